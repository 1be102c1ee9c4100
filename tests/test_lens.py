"""The lens and direct logit attribution: what is captured, against the model itself, and the measures of it."""

import copy

import numpy as np
import pytest
import torch
from analysis_cases import orthonormal, trace_of
from cases import CASES, NAMED, build, prompts_for
from tiny import TINY
from torch.nn import functional as F

import resinspect as ri
from resinspect.analysis.lens import direct_logit_attribution, lens_profile, logit_lens
from resinspect.analysis.summary import summarise
from resinspect.errors import CaptureError, OptionError, TraceError
from resinspect.families import find_layout
from resinspect.hooks.tail import find_tail

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18], [7]]
NAMES = ["llama", "gpt2", "gemma2", "cohere", "minicpm3", "deepseek_v4", "inkling2", "gemma3n", "bloom", "nanochat"]
KEEP = ("lens", "hidden", "logits")


def tiny(name):
    try:
        return next(case for case in TINY if case.name == name).build()
    except (ImportError, AttributeError) as error:
        pytest.skip(f"{name} cannot be built here: {error}")


def by_hand(tail, hidden, logits, targets):
    """KL(final || lens), entropy, overlap and loss of one reader from its own hidden vectors."""
    p = F.log_softmax(torch.tensor(logits).double(), -1)
    q = F.log_softmax(tail(torch.tensor(hidden)).double(), -1)
    common = [
        len(set(a) & set(b)) / 5 for a, b in zip(p.topk(5).indices.tolist(), q.topk(5).indices.tolist(), strict=True)
    ]
    loss = -q[torch.arange(len(q)), torch.tensor(targets)]
    return {
        "lens_kl": (p.exp() * (p - q)).sum(-1).numpy(),
        "lens_entropy": -(q.exp() * q).sum(-1).numpy(),
        "lens_overlap": np.array(common),
        "lens_loss": np.where(targets < 0, np.nan, loss.numpy()),
    }


def next_ids(trace):
    sample, ids = trace["sample"].values, trace["token_id"].values
    return np.where(np.r_[sample[1:] == sample[:-1], False], np.r_[ids[1:], 0], -1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "cohere", "opt"])
def test_in_a_plain_residual_the_lens_is_that_of_the_readers_own_input(name):
    """A restriction to one source too many, the KL the other way round, or a scale or cap forgotten."""
    model = tiny(name)
    trace = ri.capture(model, PROMPTS, keep=KEEP)
    tail = find_tail(model, find_layout(model), PROMPTS, torch.device("cpu"))
    for reader in range(trace.sizes["reader"]):
        hidden = trace["reader_hidden"].values[:, reader]
        for quantity, expected in by_hand(tail, hidden, trace["logits"].values, next_ids(trace)).items():
            np.testing.assert_allclose(trace[quantity].values[:, reader], expected, atol=2e-5, err_msg=quantity)


@torch.no_grad()
@pytest.mark.parametrize("name", ["attnres", "hyper_connections", "mhc", "denseformer", "block_attnres"])
def test_elsewhere_the_lens_is_the_final_readout_of_the_sources_so_far(name):
    """The lens of what a sublayer happens to read, called the model's prediction."""
    model = build(NAMED[name], "random")
    trace = ri.capture(model, PROMPTS, keep=KEEP)
    tail = find_tail(model, find_layout(model), PROMPTS, torch.device("cpu"))
    final, writes = trace["weight"].values[:, -1], trace["source_hidden"].values
    for reader, prefix in enumerate(trace["reader_prefix"].values):
        restricted = np.einsum("ts,tsd->td", final[:, :prefix], writes[:, :prefix])
        for quantity, expected in by_hand(tail, restricted, trace["logits"].values, next_ids(trace)).items():
            np.testing.assert_allclose(trace[quantity].values[:, reader], expected, atol=2e-4, err_msg=quantity)
    assert "restricted to the sources so far" in trace.attrs["lens_definition"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_lens_of_the_final_reader_is_the_model(case):
    """A readout that misses a source, also where weights are no scalars."""
    model = build(case, "random")
    trace = ri.capture(model, prompts_for(model), keep=("lens",))
    np.testing.assert_allclose(trace["lens_kl"][:, -1], 0, atol=2e-5)
    np.testing.assert_allclose(trace["lens_overlap"][:, -1], 1, atol=0.21)
    np.testing.assert_allclose(trace["lens_loss"][:, -1], trace["loss"], atol=2e-5)
    assert float(trace["lens_kl"][:, 0].mean()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_the_lens_of_other_families_ends_at_the_model(name):
    """A tail found by name: a soft cap, a scale or a padded head would be lost."""
    trace = ri.capture(tiny(name), PROMPTS, keep=("lens", "attribution", "logits"))
    np.testing.assert_allclose(trace["lens_kl"][:, -1], 0, atol=2e-5)
    np.testing.assert_allclose(trace["lens_loss"][:, -1], trace["loss"], atol=2e-5)
    assert "logits" in trace


def test_a_solved_map_has_a_lens():
    """A readout that needs a program."""
    model = tiny("llama")
    solved = ri.capture(model, PROMPTS, keep=("lens",), method="solve")
    replayed = ri.capture(model, PROMPTS, keep=("lens",))
    for name in ("lens_kl", "lens_entropy"):
        np.testing.assert_allclose(solved[name], replayed[name], atol=1e-3)


def test_no_logits_are_stored_and_nothing_stays():
    """A trace as large as the vocabulary, or a hook left behind."""
    model = tiny("llama")
    trace = ri.capture(model, PROMPTS, keep=("lens", "attribution"))
    assert "vocab" not in trace.dims
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain = ri.capture(model, PROMPTS, keep=())
    np.testing.assert_array_equal(plain["weight"], trace["weight"])
    assert not any(name.startswith("lens") for name in (*plain.data_vars, *plain.attrs))


def test_generated_tokens_have_their_lens():
    """A next token that decoding shifted by one."""
    model = tiny("llama")
    trace = ri.capture(model, PROMPTS[:1], keep=("lens", "attribution"), max_new_tokens=3)
    full = ri.capture(model, [trace["token_id"].values.tolist()], keep=("lens", "attribution"))
    for name in ("lens_kl", "lens_loss", "attribution"):
        np.testing.assert_allclose(trace[name], full[name], atol=1e-5)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "cohere", "gptj", "attnres", "hyper_connections", "post_ln", "dca", "ddl"]
)
def test_attribution_sums_to_the_logit_above_the_mean(name):
    """A bias, a mean or a scale that no source and no bias term gets; the token itself instead of the next."""
    model = build(NAMED[name], "random") if name in NAMED else tiny(name)
    trace = ri.capture(model, PROMPTS, keep=("attribution", "logits"))
    target, logits = next_ids(trace), trace["logits"].values.astype(float)
    margin = logits[np.arange(len(logits)), target] - logits.mean(-1)
    found = trace["attribution"].sum("source", skipna=False) + trace["attribution_bias"]
    np.testing.assert_allclose(found, np.where(target < 0, np.nan, margin), atol=2e-5)


def test_attribution_of_a_capped_model_is_before_the_cap():
    """A cap silently taken for linear."""
    trace = ri.capture(tiny("gemma2"), PROMPTS, keep=("attribution", "logits"))
    assert "before the soft cap at 30" in trace.attrs["attribution_definition"]
    raw = 30 * np.arctanh(trace["logits"].values.astype(float) / 30)
    target = next_ids(trace)
    margin = raw[np.arange(len(raw)), target] - raw.mean(-1)
    found = trace["attribution"].sum("source", skipna=False) + trace["attribution_bias"]
    np.testing.assert_allclose(found, np.where(target < 0, np.nan, margin), atol=1e-4)


def test_attribution_is_what_a_frozen_norm_gives():
    """Parts that sum to the logit and are not those of the sources: here of one source alone, by hand."""
    model = tiny("llama")
    trace = ri.capture(model, PROMPTS, keep=("attribution", "hidden"))
    target, norm = next_ids(trace), model.model.norm
    read = torch.tensor(trace["reader_hidden"].values[:, -1])
    rstd = torch.rsqrt(read.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    head = model.lm_head.weight.detach() - model.lm_head.weight.detach().mean(0)
    write = torch.tensor(trace["source_hidden"].sel(source="1.mlp").values)
    expected = ((write * rstd * norm.weight.detach()) * head[target]).sum(-1).numpy()
    np.testing.assert_allclose(
        trace["attribution"].sel(source="1.mlp"), np.where(target < 0, np.nan, expected), atol=1e-5
    )


def test_refusals_say_what_to_do():
    """A lens through a tail that is not the model's, or an attribution of what is not linear."""
    model = copy.deepcopy(tiny("llama"))
    right = model.forward

    def bent(*args, **kwargs):
        output = right(*args, **kwargs)
        output.logits = output.logits + output.logits.square()
        return output

    model.forward = bent
    with pytest.raises(CaptureError, match=r"no modules of LlamaForCausalLM give its logits.*without them in keep"):
        ri.capture(model, PROMPTS, keep=("lens",))
    with pytest.raises(CaptureError, match=r"not one norm and one matrix.*without attribution"):
        ri.capture(tiny("opt"), PROMPTS, keep=("attribution",))
    with pytest.raises(CaptureError, match=r"gives no logits.*without them in keep"):
        ri.capture(tiny("bert_bare"), PROMPTS, keep=("lens",))
    with pytest.raises(CaptureError, match=r"no causal decoder.*without them in keep"):
        ri.capture(tiny("bert"), PROMPTS, keep=("attribution",))
    seen = ri.capture(tiny("bert"), PROMPTS, keep=("lens",))
    assert "lens_kl" in seen
    assert "lens_loss" not in seen


def test_half_precision_has_a_lens(tmp_path):
    """Vectors in float32 pushed into a bfloat16 head."""
    model = tiny("llama").bfloat16()
    trace = ri.capture(model, PROMPTS, keep=("lens", "attribution"))
    assert float(trace["lens_kl"][:, -1].max()) < 0.01
    assert np.isfinite(trace["attribution"].values[:-1][next_ids(trace)[:-1] >= 0]).all()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_under_autocast_the_tail_runs_as_the_model_did(name):
    """A head in float32 held against logits in bfloat16, or vectors of another type than its matrix."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = ri.capture(tiny(name), PROMPTS, keep=("lens", "attribution"))
    assert float(trace["lens_kl"][:, -1].max()) < 1e-3
    assert np.isfinite(trace["attribution"].values[next_ids(trace) >= 0]).all()


def test_a_stored_trace_keeps_lens_and_gradients(tmp_path):
    """A variable or definition that the folder loses."""
    trace = ri.capture(tiny("llama"), PROMPTS, keep=("lens", "attribution", "gradient"))
    ri.save_trace(trace, tmp_path / "trace")
    stored = ri.open_trace(tmp_path / "trace")
    for name in ("lens_kl", "lens_loss", "attribution", "attribution_bias", "reader_gradient", "source_gradient"):
        np.testing.assert_array_equal(stored[name], trace[name])
    for name in ("lens_definition", "attribution_definition", "gradient_definition"):
        assert stored.attrs[name] == trace.attrs[name]


# Measures


def lensed(kl):
    """A made-up trace with a lens."""
    kl = np.asarray(kl, dtype=float)
    tokens, readers = kl.shape
    trace = trace_of(orthonormal(tokens, readers), samples=np.arange(tokens) // 2)
    names = ("lens_kl", "lens_entropy", "lens_overlap")
    return trace.assign({name: (("token", "reader"), kl) for name in names})


def test_profiles_are_by_depth_and_mark_what_is_given():
    """A final KL of 0 reported as a finding, or readers mixed up."""
    trace = lensed([[3, 2, 0], [1, 2, 0], [5, 2, 0], [3, 2, 0]])
    table = lens_profile(trace, resamples=50)
    kl = table[table["quantity"] == "kl"]
    assert kl["reader"].tolist() == ["0.attn", "0.mlp", "final"]
    assert kl["mean"].tolist() == [3, 2, 0]
    assert kl["sources"].tolist() == [1, 2, 3]
    assert kl["documents"].tolist() == [2, 2, 2]
    assert kl["low"].iloc[0] == 2
    assert kl["high"].iloc[0] == 4
    assert [bool(text) for text in kl["guaranteed"]] == [False, False, True]
    assert not table[table["quantity"] == "entropy"]["guaranteed"].any()
    assert "loss" not in set(table["quantity"])
    with pytest.raises(TraceError, match=r'lens_loss.*keep=\("lens"'):
        logit_lens(trace, quantity="loss")
    with pytest.raises(OptionError, match="choose one of kl, entropy, overlap, loss"):
        logit_lens(trace, quantity="js")
    with pytest.raises(TraceError, match=r'keep=\("attribution"'):
        direct_logit_attribution(trace)


def test_measures_carry_their_definition():
    """A number whose meaning only the code knows."""
    trace = ri.capture(build(NAMED["attnres"], "random"), PROMPTS, keep=("lens", "attribution"))
    assert "KL(final || lens)" in logit_lens(trace).attrs["definition"]
    found = direct_logit_attribution(trace)
    assert found.dims == ("token", "source")
    assert "frozen" in found.attrs["definition"]
    table = summarise(found, resamples=20)
    assert table["tokens"].tolist() == [11] * trace.sizes["source"]
