"""Gradients at readers and sources against autograd and finite differences of our own."""

import gc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from analysis_cases import orthonormal, trace_of
from cases import CASES, NAMED, build
from tiny import TINY
from torch.nn import functional as F

import resinspect as ri
from resinspect.analysis.lens import gradient_norms
from resinspect.errors import CaptureError, OptionError, TraceError
from resinspect.models.decoder import ResidualLM

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18], [7]]
PROMPT = PROMPTS[0]


def tiny(name):
    return next(case for case in TINY if case.name == name).build()


@contextmanager
def added(module, side, delta):
    """``delta`` added to what a module reads or gives."""
    if side == "input":
        handle = module.register_forward_pre_hook(lambda _, args: (args[0] + delta, *args[1:]))
    else:

        def hook(_, args, output):
            return (output[0] + delta, *output[1:]) if isinstance(output, tuple) else output + delta

        handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def loss_with(model, module, side, delta):
    ids = torch.tensor([PROMPT])
    with added(module, side, delta):
        logits = model(ids).logits[0, :-1]
    return F.cross_entropy(logits, ids[0, 1:])


def expected(model, module, side):
    """The gradient by a vector of zeros that is added there, ``(token, d)``, and its check by finite differences."""
    width = getattr(model.config, "hidden_size", None)
    delta = torch.zeros(1, len(PROMPT), width, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(loss_with(model, module, side, delta), delta)
    token = 2
    # The norms of Llama round to float32 inside, whatever goes in.
    step, slack = (1e-5, 1e-4) if isinstance(model, ResidualLM) else (1e-2, 1e-2)
    along = torch.zeros_like(grad)
    along[0, token] = grad[0, token] / grad[0, token].norm()
    with torch.no_grad():
        up, down = (loss_with(model, module, side, sign * step * along) for sign in (1, -1))
    assert (up - down) / (2 * step) == pytest.approx(float(grad[0, token].norm()), rel=slack)
    return grad[0].norm(dim=-1).numpy()


def places_of_llama(model):
    layers = model.model.layers
    yield "reader", "1.attn", layers[1].input_layernorm, "input"
    yield "reader", "1.mlp", layers[1].post_attention_layernorm, "input"
    yield "reader", "final", model.model.norm, "input"
    yield "source", "embed", model.model.embed_tokens, "output"
    yield "source", "0.attn", layers[0].self_attn, "output"
    yield "source", "2.mlp", layers[2].mlp, "output"


def places_of_reference(model):
    layers = model.layers
    yield "reader", "1.attn", layers[1]["attn"].norms[0], "input"
    yield "reader", "1.mlp", layers[1]["mlp"].norms[0], "input"
    yield "reader", "final", model.final.norms[0], "input"
    yield "source", "embed", model.embed_tokens, "output"
    yield "source", "0.attn", layers[0]["attn"].hook_write, "output"
    yield "source", "2.mlp", layers[2]["mlp"].hook_write, "output"


MODELS = {"llama": places_of_llama, "pre_ln": places_of_reference}
MODELS |= dict.fromkeys(("attnres", "hyper_connections", "denseformer"), places_of_reference)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_small_addition(name):
    """The gradient of the residual that goes on, instead of what one reader reads; or of another token or loss."""
    model = (tiny(name) if name == "llama" else build(NAMED[name], "random")).double()
    trace = ri.capture(model, [PROMPT], keep=("gradient",))
    for of, place, module, side in MODELS[name](model):
        found = trace[f"{of}_gradient"].sel({of: place}).values
        right = expected(model, module, side)
        np.testing.assert_allclose(found[:-1], right[:-1], rtol=1e-9, err_msg=f"{of} {place}")
        assert np.isnan(found[-1])


def test_a_write_reaches_what_the_reader_after_it_does_not():
    """Readers and sources of a plain residual that measure the same: the carry would be counted as read."""
    trace = ri.capture(tiny("llama").double(), [PROMPT], keep=("gradient",))
    read, written = trace["reader_gradient"], trace["source_gradient"]
    assert (np.abs(read.sel(reader="1.attn") / written.sel(source="0.mlp") - 1)[:-1] > 0.01).all()
    np.testing.assert_allclose(read.sel(reader="final"), written.sel(source="2.mlp"), rtol=1e-9)


def test_streams_of_other_families_have_gradients_too():
    """A tensor that a family computes from others, whose gradient would be none."""
    trace = ri.capture(tiny("deepseek_v4"), [PROMPT], keep=("gradient",))
    for of in ("reader", "source"):
        assert (trace[f"{of}_gradient"].values[:-1] > 0).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_connection_has_them_whatever_the_batch(case):
    """Padding, or the other prompts of a batch, in a prompt's own mean loss."""
    model = build(case, "random")
    together = ri.capture(model, PROMPTS, keep=("gradient",))
    for i, prompt in enumerate(PROMPTS):
        mine, alone = ri.select(together, samples=[i]), ri.capture(model, [prompt], keep=("gradient",))
        for name in ("reader_gradient", "source_gradient"):
            size = np.nanmax(alone[name].values, initial=1e-3)
            np.testing.assert_allclose(mine[name], alone[name], atol=1e-4 * size, rtol=1e-3, err_msg=name)
            assert np.isnan(mine[name][-1]).all()
            assert not np.isnan(mine[name][:-1]).any()


def test_nothing_is_left_behind():
    """A parameter's own gradient overwritten, a hook, a graph or a training flag left behind."""
    model = tiny("llama")
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    model.train()
    model.model.layers[0].eval()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    trace = ri.capture(model, PROMPTS, keep=("gradient",))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert (parameter.grad == 1).all()
    assert all(p.grad is None for p in model.parameters() if p is not parameter)
    assert model.training
    assert not model.model.layers[0].training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is torch.Tensor and x.grad_fn is not None]
    assert torch.is_grad_enabled()
    assert "reader_gradient" in trace


def test_frozen_parameters_and_modes_of_torch_do_not_matter():
    """A model whose parameters are frozen gives no gradient, or one of its parameters starts to learn."""
    model = tiny("llama")
    expected = ri.capture(model, PROMPTS, keep=("gradient",))
    with torch.no_grad():
        quiet = ri.capture(model, PROMPTS, keep=("gradient",))
    with torch.inference_mode():
        inferred = ri.capture(model, PROMPTS, keep=("gradient",))
    model.requires_grad_(False)
    frozen = ri.capture(model, PROMPTS, keep=("gradient",))
    assert not any(p.requires_grad for p in model.parameters())
    for trace in (quiet, inferred, frozen):
        np.testing.assert_array_equal(trace["reader_gradient"], expected["reader_gradient"])
        np.testing.assert_array_equal(trace["source_gradient"], expected["source_gradient"])


def test_a_tensor_that_is_also_the_residual_has_no_gradient_of_its_own():
    """The gradient of the carry reported as that of what is read."""
    trace = ri.capture(tiny("minimax"), [PROMPT], keep=("gradient",))
    assert np.isnan(trace["reader_gradient"].sel(reader="1.attn")).all()
    assert (trace["reader_gradient"].sel(reader="final")[:-1] > 0).all()
    assert (trace["source_gradient"][:-1] > 0).all()


def test_refusals_say_what_to_do():
    """A gradient of no loss."""
    with pytest.raises(CaptureError, match=r"no causal decoder.*without them in keep"):
        ri.capture(tiny("bert"), [PROMPT], keep=("gradient",))
    with pytest.raises(CaptureError, match=r"one logit for each.*without gradient in keep"):
        ri.capture(tiny("muse_spark"), [PROMPT], keep=("gradient",))
    with pytest.raises(OptionError, match="gradient needs one whole forward pass"):
        ri.capture(tiny("llama"), [PROMPT], keep=("gradient",), max_new_tokens=2)
    with pytest.raises(TraceError, match=r'keep=\("gradient"'):
        gradient_norms(trace_of(orthonormal(2, 3)))


def test_table_of_norms():
    """A ratio of the wrong means, or documents and places mixed up."""
    trace = trace_of(orthonormal(4, 3), samples=[0, 0, 1, 1])
    nan = np.nan
    read = [[2, 4, 1], [nan] * 3, [4, 4, 3], [nan] * 3]
    written = [[nan, 1, 3], [nan] * 3, [nan, 1, 5], [nan] * 3]
    trace = trace.assign(
        reader_gradient=(("token", "reader"), np.array(read)), source_gradient=(("token", "source"), np.array(written))
    )
    table = gradient_norms(trace, resamples=100).set_index(["of", "name"])
    assert table.loc[("reader", "0.mlp"), "mean"] == 4
    assert table.loc[("reader", "final"), "relative"] == pytest.approx(2 / 3)
    assert table.loc[("reader", "final"), "relative_low"] == pytest.approx(1 / 2)
    assert table.loc[("reader", "final"), "relative_high"] == pytest.approx(3 / 4)
    assert np.isnan(table.loc[("source", "embed"), "mean"])
    assert table.loc[("source", "0.mlp"), "relative"] == 4
    assert table.loc[("reader", "0.attn"), "documents"] == 2
    assert table.loc[("source", "0.mlp"), ["kind", "layer"]].tolist() == ["mlp", 0]
    alone = gradient_norms(ri.select(trace, samples=[0]), resamples=100)
    assert np.isnan(alone[["low", "high", "relative_low", "relative_high"]].values).all()
