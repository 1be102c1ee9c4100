"""Edits of W on our own connections, against closed forms and models rewritten by hand."""

import copy

import numpy as np
import pytest
import torch
from cases import CASES, NAMED, build, prompts_for
from torch import nn
from torch.nn import functional as F

import resinspect as ri
from resinspect.anatomy import decoder_anatomy
from resinspect.errors import CaptureError, OptionError, TraceError
from resinspect.families import Event, Layout, Tap
from resinspect.interventions import (
    ablate_edge,
    ablate_source,
    effects,
    freeze_to,
    intervene,
    mean_routing,
    recency_only,
    shuffle_tokens,
    uniform_routing,
)
from resinspect.program import COEFFICIENT, Connection

MODES = ("recomputed", "frozen")
SCALAR = [case for case in CASES if build(case, "init").connection.carrier == COEFFICIENT]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
both_modes = pytest.mark.parametrize("downstream", MODES)


def random_model(name, dtype=torch.float64):
    return build(NAMED[name], "random", dtype)


def changes(model, edits, downstream="recomputed", prompts=None, **options):
    return intervene(model, prompts or prompts_for(model), edits, downstream=downstream, **options)


def nothing(result, tolerance=0.0):
    return float(np.nanmax(np.abs(result["loss_change"]))) <= tolerance and float(result["kl"].max()) <= tolerance


def against(result, clean, edited):
    """Whether the effects are those of two models' own logits on single prompts."""
    for i, prompt in enumerate(prompts_for(clean)):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            p, q = clean(ids).logits[0].log_softmax(-1), edited(ids).logits[0].log_softmax(-1)
        mine = result["sample"].values == i
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        np.testing.assert_allclose(result["kl"].values[0, mine], kl, rtol=1e-6, atol=1e-9)
        change = (p[:-1] - q[:-1]).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(result["loss_change"].values[0, mine][:-1], change, rtol=1e-6, atol=1e-9)
        assert np.isnan(result["loss_change"].values[0, mine][-1])


@every_case
@both_modes
def test_a_factor_of_one_changes_no_bit(case, downstream):
    """An edit that goes through a sum although it does nothing."""
    model = build(case, "random")
    assert nothing(changes(model, ablate_edge("0.attn", "2.mlp", factor=1.0), downstream))


@pytest.mark.parametrize("case", SCALAR, ids=str)
@both_modes
def test_freezing_to_the_own_trace_changes_nothing(case, downstream):
    """Rows that come back at another token, reader or source than they were taken from."""
    model = build(case, "random")
    prompts = prompts_for(model)
    result = changes(model, freeze_to(ri.capture(model, prompts)), downstream, batch_size=3)
    assert nothing(result, 1e-5)
    assert float(result["missed"].max()) < 1e-5


@every_case
def test_a_source_ablated_everywhere_is_a_sublayer_that_writes_zero(case):
    """A write that only some of readers, routers and carry miss."""
    model = build(case, "random", torch.float64)
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.layers[1]["attn"].output.weight.zero_()
    against(changes(model, ablate_source("1.attn", mode="everywhere")), model, silent)


@every_case
def test_modes_of_a_source_are_one_where_nothing_can_tell_them_apart(case):
    """Frozen routing that still lets routers look, or a carry that loses what only readers should."""
    model = build(case, "random", torch.float64)
    first, second = (changes(model, ablate_source("1.mlp", mode=m), "frozen") for m in ("readers", "everywhere"))
    np.testing.assert_allclose(first["kl"], second["kl"], rtol=1e-6, atol=1e-9)
    assert float(first["kl"].max()) > 1e-4
    first, second = (changes(model, ablate_source("1.mlp", mode=m)) for m in ("readers", "everywhere"))
    routed = case.connection not in ("pre_ln", "sandwich", "denseformer", "short_swa")
    static = case.checkpoint in ("attnres_fixed_static", "hyper_connections_static", "dca_grn_v1", "dca_grn_v2")
    same = np.allclose(first["kl"], second["kl"], rtol=1e-6, atol=1e-9)
    assert same == (not routed or static), "readers alone differ from everywhere just where routing sees the write"


@both_modes
def test_an_edge_to_the_readout_by_hand(downstream):
    """A contribution of the wrong sign, token or source."""
    model = random_model("pre_ln")
    result = changes(model, ablate_edge("1.mlp", "final"), downstream)
    silent = copy.deepcopy(model)
    written = {}
    silent.layers[1]["mlp"].hook_write.register_forward_hook(lambda m, a, out: written.update(v=out))
    silent.final.hook_read.register_forward_hook(lambda m, a, out: out - written["v"])
    against(result, model, silent)


class Linear(nn.Module):
    """Two linear sublayers on a plain residual: every effect has a closed form."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def matrix(*shape):
            return nn.Parameter(0.4 * torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.embed, self.a, self.b, self.head = matrix(11, 6), matrix(6, 6), matrix(6, 6), matrix(11, 6)
        self.x, self.read_a, self.write_a, self.read_b, self.write_b, self.final = (nn.Identity() for _ in range(6))

    def forward(self, input_ids):
        h = self.x(self.embed[input_ids])
        h = h + self.write_a(self.read_a(h) @ self.a.mT)
        h = h + self.write_b(self.read_b(h) @ self.b.mT)
        return (self.final(h) @ self.head.mT,)


@pytest.fixture
def linear(monkeypatch):
    model, anatomy = Linear(), decoder_anatomy(1)
    places = [("x", "source", 0), ("read_a", "reader", 0), ("write_a", "source", 1), ("read_b", "reader", 1)]
    places += [("write_b", "source", 2), ("final", "reader", 2)]
    taps = tuple(Tap(name, getattr(model, name), "output", Event(what, i)) for name, what, i in places)
    layout = Layout("linear", "pre_ln", anatomy, taps, Connection(), "", "")
    monkeypatch.setattr("resinspect.interventions.session.find_layout", lambda _: layout)
    return model


@pytest.mark.parametrize(
    ("edit", "change"),
    [
        (ablate_edge("0.attn", "0.mlp"), lambda x, a, b: -x @ a.mT @ b.mT),
        (ablate_edge("embed", "0.attn", factor=0.5), lambda x, a, b: -0.5 * (x @ a.mT + x @ a.mT @ b.mT)),
        (ablate_edge("embed", "final", factor=3.0), lambda x, a, b: 2 * x),
        (ablate_source("0.attn", mode="readers"), lambda x, a, b: -x @ a.mT - x @ a.mT @ b.mT),
        (ablate_source("0.attn", mode="everywhere"), lambda x, a, b: -x @ a.mT - x @ a.mT @ b.mT),
        (recency_only(1), lambda x, a, b: x @ a.mT @ b.mT - (x + x @ a.mT + x @ b.mT + x @ a.mT @ b.mT)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@both_modes
def test_linear_model_in_closed_form(linear, edit, change, downstream):
    """An edit that does not propagate, or one that propagates along paths it should not."""
    prompt = [3, 1, 4, 1, 5]
    result = changes(linear, edit, downstream, [prompt])
    x, a, b, head = linear.embed[prompt], linear.a, linear.b, linear.head
    with torch.no_grad():
        clean = (x + x @ a.mT + (x + x @ a.mT) @ b.mT) @ head.mT
        p, q = (y.log_softmax(-1) for y in (clean, clean + change(x, a, b) @ head.mT))
    np.testing.assert_allclose(result["kl"][0], (p.exp() * (p - q)).sum(-1), rtol=1e-9, atol=1e-12)


def test_an_edge_that_is_not_read_has_no_effect():
    """A contribution formed from the write alone, without its weight."""
    model = random_model("hyper_connections_static")
    with torch.no_grad():
        model.connection.post[2].zero_()  # the write of 1.attn enters no stream
    readers = [reader.name for reader in model.anatomy.readers if reader.prefix > 3]
    assert nothing(changes(model, [ablate_edge("1.attn", reader) for reader in readers]))
    assert not nothing(changes(model, ablate_edge("1.mlp", readers[-1])))


@pytest.mark.parametrize("name", ["pre_ln", "denseformer", "hyper_connections_static", "attnres_fixed_static"])
@both_modes
def test_static_routing_has_no_mean_and_no_order(name, downstream):
    """A mean over something else than tokens."""
    assert nothing(changes(random_model(name), [mean_routing(), shuffle_tokens()], downstream), 1e-9)


def test_routing_of_the_plain_residual_is_uniform_already():
    """A uniform row of another size than the one it replaces."""
    assert nothing(changes(random_model("pre_ln"), uniform_routing()))


@pytest.mark.parametrize("name", ["attnres", "hyper_connections", "mhc", "block_attnres"])
def test_edits_of_the_whole_map_depend_on_the_mode_only_through_w(name):
    """Frozen routing that is not what the clean run had, or edits that routers undo."""
    model = random_model(name)
    prompts = prompts_for(model)
    trace = ri.capture(model, prompts)
    same = [mean_routing(), mean_routing(trace), freeze_to(trace)]
    first, second = (changes(model, same, mode) for mode in MODES)
    np.testing.assert_allclose(first["kl"], second["kl"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(first["kl"][0], first["kl"][1], rtol=1e-5, atol=1e-7)
    assert nothing(changes(model, shuffle_tokens(order=np.arange), "frozen"))
    assert nothing(changes(model, [recency_only(99), mean_routing(readers=[])]))
    strong = changes(model, [mean_routing(), uniform_routing(), recency_only(), shuffle_tokens()])
    assert (strong["kl"].median("token") > 1e-4).all()


@pytest.mark.parametrize("name", ["attnres", "hyper_connections", "dca", "post_ln", "ddl"])
@both_modes
def test_prompts_of_a_batch_do_not_touch_each_other(name, downstream):
    """Padding that is edited, or rows that come from another prompt."""
    model = random_model(name)
    edits = [ablate_edge("0.mlp", "2.attn.q" if name == "dca" else "2.attn"), recency_only(2)]
    edits += [] if name in ("dca", "post_ln", "ddl") else [shuffle_tokens(), uniform_routing()]
    together, alone = (changes(model, edits, downstream, batch_size=size) for size in (4, 1))
    np.testing.assert_allclose(together["kl"], alone["kl"], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(together["token_id"], alone["token_id"])


def test_nothing_is_left_behind_even_after_a_refusal():
    """Hooks or flags that stay, so that the next forward is edited too."""
    model = random_model("dca").train()
    ids = torch.tensor([prompts_for(model)[0]])
    before = model(ids).logits
    changes(model, ablate_source("1.attn", mode="readers"))
    other = random_model("attnres")
    trace = ri.select(ri.capture(other, prompts_for(other)), samples=[1])
    with pytest.raises(TraceError, match="no token at position 0 of prompt 0"):
        changes(other, freeze_to(trace))
    for module in (*model.modules(), *other.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.training
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("edit", [mean_routing(), uniform_routing(), shuffle_tokens()], ids=lambda e: e.name)
def test_rows_that_are_no_numbers_are_refused(edit):
    """The best scalar of a per-channel W, used as if it were W."""
    with pytest.raises(CaptureError, match="not one number per source and token; ablate_edge"):
        changes(random_model("dca"), edit)


@pytest.mark.parametrize(
    ("edit", "options", "match"),
    [
        (ablate_edge("9.attn", "final"), {}, "names source '9.attn'; the model has embed"),
        (ablate_edge("embed", "9.attn"), {}, "names reader '9.attn'"),
        (recency_only(), {"downstream": "frosen"}, "choose one of recomputed, frozen"),
        ([recency_only(), recency_only()], {}, "each only once"),
        ([], {}, "give at least one"),
        ("uniform", {}, "make edits with functions such as ri.ablate_edge"),
        (ablate_edge("1.attn", "1.attn"), {}, "takes '1.attn' from '1.attn', which reads before it is written"),
        (ablate_edge("1.mlp", "0.attn"), {}, "reads before it is written"),
        (shuffle_tokens(order=lambda n: [0]), {}, "must give . numbers from 0 to"),
        (shuffle_tokens(order=lambda n: range(1, n + 1)), {}, "must give . numbers from 0 to"),
    ],
)
def test_mistakes_are_named(edit, options, match):
    """A silent no-op because a name was misspelt."""
    with pytest.raises(OptionError, match=match):
        changes(random_model("attnres"), edit, **options)
    with pytest.raises(OptionError, match="choose one of readers, everywhere"):
        ablate_source("embed", mode="all")
    with pytest.raises(OptionError, match="at least 1 source"):
        recency_only(0)


@pytest.mark.parametrize("part", [{"sources": ["1.attn"]}, {"readers": ["final"]}])
@pytest.mark.parametrize("edit", [freeze_to, mean_routing])
def test_rows_of_a_part_of_a_trace_are_refused(edit, part):
    """One weight broadcast to every source, or a KeyError in the middle of a forward."""
    model = random_model("attnres")
    trace = ri.select(ri.capture(model, prompts_for(model)), **part)
    with pytest.raises(OptionError, match="other readers or sources"):
        changes(model, edit(trace))
    if "readers" in part:
        assert not nothing(changes(model, mean_routing(trace, readers=["final"])))


def test_effects_of_nothing_are_named():
    """What another function gave, or tokens that are all dropped, and numpy's own message."""
    model = random_model("attnres")
    result = changes(model, recency_only())
    with pytest.raises(OptionError, match=r"give what ri\.intervene returns"):
        effects(result.drop_vars(["kl", "loss_change"]))
    with pytest.raises(OptionError, match="drop_first is 99, but the longest document has"):
        effects(result, drop_first=99)


def test_table_of_effects():
    """Intervals over tokens instead of documents, or one where there is a single document."""
    model = random_model("attnres")
    table = effects(changes(model, [recency_only(), uniform_routing()]), drop_first=1)
    assert table["measure"].tolist() == ["loss_change"] * 2 + ["kl"] * 2
    assert (table["low"] < table["mean"]).all()
    assert table["documents"].tolist() == [3] * 4  # the prompt of one token is dropped
    alone = effects(changes(model, recency_only(), prompts=[[5, 6, 7]]))
    assert alone[["low", "high"]].isna().to_numpy().all()
