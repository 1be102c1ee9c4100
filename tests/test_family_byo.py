"""Models of one's own: modules of published packages, with the mistakes that must be found, and bridges."""

import warnings

import numpy as np
import pytest
import torch
from tiny import TINY
from tiny.byo import STREAMS, DWAModules, own
from torch import nn
from transformers import AutoTokenizer

import resinspect as ri
from resinspect.errors import CaptureError
from resinspect.families import denseformer_modules, find_layout, hyper_connections_modules

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18]]
HYPER = ["hc", "hc_views", "hc_pool", "hc_hand", "mhc", "mhc_v2"]
DENSE = ["dwa", "dwa_2x3", "dwa_blocks"]


def built(trunk):
    if trunk in HYPER:
        pytest.importorskip("hyper_connections", reason="hyper-connections, or something it requires, is not installed")
    return own(trunk)


def judged(model, **options):
    """The verdict of a map, or that it was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return ri.fidelity_summary(ri.capture(model, PROMPTS, **options))["verdict"]
        except CaptureError:
            return "refused"


# Published modules


def test_any_module_will_do():
    """Families that only know models of transformers."""

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = built("dwa")

        def forward(self, ids):
            return self.inside(ids).logits

    trace = ri.capture(Bare().eval(), PROMPTS)
    assert trace.attrs["family"] == "denseformer_modules"
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    np.testing.assert_array_equal(trace["loss"].values, ri.capture(built("dwa"), PROMPTS)["loss"].values)


def test_dwa_is_that_of_the_package():
    """Our module of the same structure, with other sums than theirs."""
    package = pytest.importorskip("denseformer", reason="denseformer is in no package index")
    if not hasattr(package, "DWAModules"):
        pytest.skip("the denseformer that is installed has no DWAModules")
    theirs, ours = package.DWAModules(7, 2, 3), DWAModules(7, 2, 3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(8, 2, 5, 32)
    theirs.init_accumulators(x[0])
    ours.init_accumulators(x[0])
    for i in range(7):
        torch.testing.assert_close(theirs(x[i + 1], block_idx=i), ours(x[i + 1], block_idx=i))


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (2, 3)])
def test_dwa_weights_follow_by_hand(dilation, period):
    """Weights along some of the paths, or an average of residuals after the last block only."""
    model = built("dwa_blocks")
    model.trunk.dwa = DWAModules(5, dilation, period)
    with torch.no_grad():
        for alpha in model.trunk.dwa.parameters():
            alpha.normal_()
    outputs, residual = [np.eye(6)[0]], np.eye(6)[0]
    rows = [residual]
    for i in range(5):
        outputs.append(residual + np.eye(6)[i + 1])
        residual = outputs[-1]
        if (i + 1) % period == 0:
            alpha = model.trunk.dwa.alphas[i].weight[0].tolist()
            residual = sum(
                a * outputs[j] for a, j in zip(alpha, range((i + 1) % dilation, i + 2, dilation), strict=True)
            )
        rows.append(residual)
    weight = ri.capture(model, PROMPTS)["weight"].values
    np.testing.assert_allclose(np.nan_to_num(weight), np.broadcast_to(rows, weight.shape), rtol=1e-5, atol=1e-6)


def test_hyper_connection_weights_follow_by_hand():
    """A mixing matrix the wrong way round, or streams in the order of another batch layout."""
    model = built("hc")
    n, sources = STREAMS, 7
    with torch.no_grad():
        for hc in [*model.trunk.attn_hc, *model.trunk.ff_hc]:
            hc.dynamic_alpha_scale.zero_()
            hc.dynamic_beta_scale.zero_()
    state, rows = np.tile(np.eye(sources)[0], (n, 1)), []
    pairs = zip(model.trunk.attn_hc, model.trunk.ff_hc, strict=True)
    for i, hc in enumerate(hc for pair in pairs for hc in pair):
        alpha, beta = hc.static_alpha.detach().double().numpy(), hc.static_beta.detach().double().numpy()
        rows.append(alpha[:, 0] @ state)
        state = alpha[:, 1:].T @ state + np.outer(beta, np.eye(sources)[i + 1])
    rows.append(state.sum(0))
    weight = ri.capture(model, PROMPTS)["weight"].values
    np.testing.assert_allclose(np.nan_to_num(weight), np.broadcast_to(rows, weight.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trunk", HYPER)
@pytest.mark.parametrize("mistake", ["transposed", "unmixed", "no post", "other streams"])
def test_mistakes_about_hyper_connections_are_found(trunk, mistake, monkeypatch):
    """A fidelity that closes with other weights than the module's."""
    family, model = hyper_connections_modules, built(trunk)
    mix, post, unfolded = family._mix, family._post, family._unfolded
    if mistake == "transposed":
        monkeypatch.setattr(family, "_mix", lambda *a: mix(*a).mT)
    elif mistake == "unmixed":
        monkeypatch.setattr(family, "_mix", lambda *a: torch.eye(STREAMS).expand_as(mix(*a)))
    elif mistake == "no post":
        monkeypatch.setattr(family, "_post", lambda *a: torch.ones_like(post(*a)))
    else:
        monkeypatch.setattr(family, "_unfolded", lambda x: unfolded(x).roll(1, 2))
    assert judged(model) in ("off", "refused")


@pytest.mark.parametrize("trunk", DENSE)
@pytest.mark.parametrize("mistake", ["reversed", "undilated", "no average"])
def test_mistakes_about_averages_are_found(trunk, mistake, monkeypatch):
    """Weights taken in another order, of other outputs, or not at all."""
    family, model = denseformer_modules, built(trunk)
    if mistake == "reversed":
        monkeypatch.setattr(
            family, "_alpha", lambda row: lambda s: row.weight[0].flip(0).expand(*s.output.shape[:2], -1)
        )
    elif mistake == "no average":
        monkeypatch.setattr(
            family.Averaged, "read", lambda self, c, state, site, n: ((state[1],) * len(site.views), state)
        )
    elif model.trunk.dwa.dilation == 1:
        pytest.skip("not dilated")
    else:
        right = family.Averaged.read

        def undilated(self, carrier, state, site, native):
            outputs, residual = state
            if "alpha" in native:
                count = native["alpha"].shape[-1]
                outputs = (*[outputs[-1]] * (len(outputs) - count), *outputs[-count:])
                return (), (state[0], carrier.combine(native["alpha"], outputs[-count:]))
            return right(self, carrier, (outputs, residual), site, native)

        monkeypatch.setattr(family.Averaged, "read", undilated)
    assert judged(model) in ("off", "refused")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_fracs": 2}, "split channels into fractions"),
        ({"channel_first": True}, "hold channels before tokens"),
        ({"add_branch_out_to_residual": False}, "add nothing back"),
    ],
)
def test_forms_that_are_not_known_are_one_sentence(options, words):
    """A map of half the channels, or a KeyError."""
    model = built("hc")
    hyper = pytest.importorskip("hyper_connections")
    model.trunk.attn_hc[1] = hyper.HyperConnections(STREAMS, dim=32, **options)
    with pytest.raises(CaptureError, match=words):
        ri.capture(model, PROMPTS)


def test_streams_that_nothing_adds_up_are_one_sentence():
    """A readout guessed from the wrong norm."""
    model = built("hc_hand")
    model.second_norm = nn.LayerNorm(32)
    with pytest.raises(CaptureError, match="not what adds up its streams at the end"):
        ri.capture(model, PROMPTS)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_streams_may_be_averaged_at_the_end(share, monkeypatch):
    """A sum taken for a mean."""
    model = built("hc")
    einops = pytest.importorskip("einops.layers.torch")
    model.trunk.reduce = einops.Reduce("(b s) ... -> b ...", "mean", s=STREAMS)
    layout = find_layout(model)
    assert layout.connection.share == 0.25
    layout.connection.share = share
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    assert judged(model) == ("exact" if share == 0.25 else "refused")


# Bridges of transformer_lens


BRIDGED = [tiny for tiny in TINY if tiny.name in ("llama", "gpt2", "gemma4", "deepseek_v4", "granite", "olmo2")]


@pytest.fixture(scope="module")
def bridge_of(tmp_path_factory, pytestconfig):
    """A bridge booted from a folder, and the model that was stored there."""
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = AutoTokenizer.from_pretrained(pytestconfig.rootpath / "data" / "tokenizer", local_files_only=True)

    def boot(tiny):
        folder = tmp_path_factory.mktemp("bridge")
        model = tiny.build()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return TransformerBridge.boot_transformers(str(folder), device="cpu"), model

    return boot


@pytest.mark.parametrize("tiny", BRIDGED, ids=str)
def test_a_bridge_has_the_map_of_its_model(tiny, bridge_of):
    """Its own decomposition is wrong for gemma4 and does not exist for deepseek_v4; and hooks are left in it."""
    bridge, model = bridge_of(tiny)
    trace, expected = ri.capture(bridge, PROMPTS), ri.capture(model, PROMPTS)
    assert trace.attrs["family"] == tiny.family
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    np.testing.assert_allclose(trace["weight"].values, expected["weight"].values, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trace["loss"].values, expected["loss"].values, rtol=1e-4, atol=1e-5)
    assert trace["reader"].values.tolist() == expected["reader"].values.tolist()


def test_a_bridge_shows_what_it_computes(bridge_of):
    """The untouched model behind the bridge, while the bridge folds its norms and a user's hook ablates a write."""
    bridge, _ = bridge_of(next(tiny for tiny in BRIDGED if tiny.name == "llama"))
    before = ri.capture(bridge, PROMPTS)
    bridge.enable_compatibility_mode()
    folded = ri.capture(bridge, PROMPTS)
    assert ri.fidelity_summary(folded)["verdict"] == "exact"
    np.testing.assert_allclose(folded["loss"].values, before["loss"].values, rtol=1e-4, atol=1e-5)
    with bridge.hooks(fwd_hooks=[("blocks.1.mlp.hook_out", lambda tensor, hook: tensor * 0)]):
        ablated = ri.capture(bridge, PROMPTS)
    assert (ablated["source_norm"].sel(source="1.mlp") == 0).all()
    assert (folded["source_norm"].sel(source="1.mlp") > 0).all()


def test_a_bridge_is_solved_from_its_own_names(bridge_of):
    """Names of the bridge looked up in the model behind it."""
    bridge, _ = bridge_of(next(tiny for tiny in BRIDGED if tiny.name == "gpt2"))
    pairs = [("blocks.*.attn", "blocks.*.ln1"), ("blocks.*.mlp", "blocks.*.ln2")]
    trace = ri.capture(bridge, PROMPTS, sublayers=pairs, final="ln_final")
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    assert trace["source"].values.tolist()[1] == "blocks.0.attn"
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, 1, rtol=1e-4)
