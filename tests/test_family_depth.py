"""Depth attention: mistakes of the kind one makes must show, and W must be what the algebra says by hand."""

import warnings

import numpy as np
import pytest
import torch
from test_families import PROMPTS
from tiny.depth import inkling2, inkling2_full_first, inkling2_loop, inkling2_loop_blocks, open_attnres
from transformers import LlamaConfig, LlamaForCausalLM

import resinspect as ri
from resinspect.errors import CaptureError
from resinspect.families import find_layout
from resinspect.families import inkling2 as blocks_family
from resinspect.families import inkling2_loop as loop_family
from resinspect.families import open_attnres as open_family

RECOGNISE = (blocks_family.recognise, loop_family.recognise, open_family.recognise)


def with_read(monkeypatch, connection, change):
    """The connection, its natives changed before every read."""
    right = connection.read
    monkeypatch.setattr(connection, "read", lambda c, s, site, native: right(c, s, site, change(dict(native))))


def scale_dropped(monkeypatch, connection):
    with_read(monkeypatch, connection, lambda native: native and native | {"scale": torch.ones_like(native["scale"])})


def softmax_dropped(monkeypatch, connection):
    def uniform(native):
        alpha = native.get("alpha")
        return native if alpha is None else native | {"alpha": torch.full_like(alpha, 1 / alpha.shape[-1])}

    with_read(monkeypatch, connection, uniform)


def boundaries_late(monkeypatch, connection):
    monkeypatch.setattr(connection, "boundary", (connection.boundary[-1], *connection.boundary[:-1]))


def mlp_gate_dropped(monkeypatch, connection):
    def plain(native):
        changes = {"keep_mlp": torch.ones_like, "take_mlp": torch.zeros_like}
        return native | {name: change(native[name]) for name, change in changes.items() if name in native}

    with_read(monkeypatch, connection, plain)


def messages_of_wrong_blocks(monkeypatch, connection):
    """The pre-loop sum taken for the first block of the message."""
    right = connection._enter

    def shifted(state, call):
        after = right(state, call)
        if not call:
            return after
        blocks, partial = state.now
        return after._replace(previous=(blocks[len(state.entry[0]) : -1], partial))

    monkeypatch.setattr(connection, "_enter", shifted)


def passes_go_on(monkeypatch, connection):
    """Later passes start where the last one ended; their blocks are cut to the number that the model has."""
    right = connection._enter

    def onward(state, call):
        after = right(state, call)
        return after if not call else after._replace(now=(state.entry[0], state.now[1]))

    monkeypatch.setattr(connection, "_enter", onward)


def writes_for_states(monkeypatch, connection):
    def write(carrier, state, site, native, value):
        kept, current = state
        return ((*kept, value) if connection.keeps(site.layer, site.kind) else kept), current + value

    monkeypatch.setattr(connection, "write", write)


def gate_dropped(monkeypatch, connection):
    with_read(monkeypatch, connection, lambda native: {k: v for k, v in native.items() if k != "gate"})


MISTAKES = [
    (inkling2, scale_dropped),
    (inkling2, softmax_dropped),
    (inkling2_full_first, softmax_dropped),
    (inkling2_loop_blocks, boundaries_late),
    (inkling2_loop, mlp_gate_dropped),
    (inkling2_loop, messages_of_wrong_blocks),
    (inkling2_loop, passes_go_on),
    (lambda: open_attnres("block"), writes_for_states),
    (lambda: open_attnres("full"), writes_for_states),
    (lambda: open_attnres("block"), softmax_dropped),
    (lambda: open_attnres("block", "sigmoid_scalar"), gate_dropped),
    (lambda: open_attnres("block", "sigmoid_vector"), gate_dropped),
]


@pytest.mark.parametrize(("build", "mistake"), MISTAKES, ids=[f"{i}-{m.__name__}" for i, (_, m) in enumerate(MISTAKES)])
def test_deliberate_mistakes_show(build, mistake, monkeypatch):
    """A fidelity check that a plausible misreading of the forward passes."""
    model = build()
    layout = find_layout(model)
    mistake(monkeypatch, layout.connection)
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            verdict = ri.fidelity_summary(ri.capture(model, PROMPTS))["verdict"]
        except CaptureError as error:
            verdict = str(error)
    assert verdict == "off" or "the map is wrong" in verdict


def test_zero_queries_average_normed_blocks():
    """Weights that close but are not alpha over the root mean square of a block's own sum."""
    model = inkling2_full_first()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_input.query"):
                parameter.zero_()
    trace = ri.capture(model, PROMPTS[:1], keep=("hidden",))
    writes = trace["source_hidden"].values
    # Blocks of three layers: the embedding, the six writes of layers 0 to 2, and what there is of layers 3 and 4.
    for reader, groups in {
        "0.mlp": [1, 2],
        "2.mlp": [1, 6],
        "3.attn.k": [1, 7],
        "4.mlp": [1, 7, 10],
        "final": [1, 7, 11],
    }.items():
        expected = np.zeros_like(trace["weight"].sel(reader=reader).values)
        for start, stop in zip([0, *groups[:-1]], groups, strict=True):
            mean_square = np.square(writes[:, start:stop].sum(1)).mean(-1)
            expected[:, start:stop] = (1 / len(groups) / np.sqrt(mean_square + 1e-6))[:, None]
        found = trace["weight"].sel(reader=reader).values
        np.testing.assert_allclose(np.nan_to_num(found), expected, rtol=1e-5)


def test_full_layers_read_separately_for_queries_keys_and_values():
    """Three readers given the same row."""
    weight = ri.capture(inkling2(), PROMPTS[:1])["weight"]
    rows = [weight.sel(reader=f"3.attn.{view}").values for view in "qkv"]
    assert "2.attn" in weight["reader"].values
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.nanmax(np.abs(rows[one] - rows[other])) > 0.01


def test_a_pass_is_seen_by_the_next_one_only_and_only_through_messages():
    """Passes unrolled as one deep stack: earlier passes would stay visible."""
    model = inkling2_loop()
    trace = ri.capture(model, PROMPTS)
    size = trace["contribution_norm"].max("token")
    first = ["2.attn", "2.mlp", "3.attn", "3.mlp"]
    assert (size.sel(reader=["2@1.attn.q", "2@1.attn.v", "3@1.mlp"], source=first) > 0).all()
    assert (size.sel(reader=["2@2.attn.q", "3@2.mlp", "4.attn", "final"], source=first) == 0).all()
    assert (size.sel(reader=["4.attn", "final"], source=["1.mlp", "2@2.attn", "3@2.mlp"]) > 0).all()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("message_gate_proj.weight"):
                parameter.zero_()
    silent = ri.capture(model, PROMPTS)["contribution_norm"].max("token")
    assert (silent.sel(reader=["2@1.attn.q", "3@1.mlp", "3@2.attn.v"], source=first) == 0).all()
    assert (silent.sel(reader="3@2.mlp", source=["2@1.attn", "3@1.mlp"]) == 0).all()


def test_conditional_generation_models_hold_the_same_decoder():
    """A decoder that is found only where nothing is around it."""
    from transformers import Inkling2Config, Inkling2ForConditionalGeneration

    text = inkling2()
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vision |= {"text_hidden_size": 32, "projection_hidden_dim": 16, "patch_size": 4}
    config = Inkling2Config(text_config=text.config.to_dict(), vision_config=vision, image_token_id=96)
    whole = Inkling2ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    found, expected = ri.capture(whole, PROMPTS), ri.capture(text, PROMPTS)
    np.testing.assert_allclose(found["weight"].values, expected["weight"].values, rtol=1e-5, atol=1e-6)
    assert all(name in dict(whole.named_parameters()) for name in find_layout(whole).routing)


@pytest.mark.parametrize("recognise", RECOGNISE)
def test_other_models_are_left_alone(recognise):
    """A family that claims, or stumbles over, a model without its parts."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=97
    )
    others = [torch.nn.Linear(2, 2), torch.nn.ModuleList(), LlamaForCausalLM(config)]
    mine = {
        blocks_family.recognise: inkling2,
        loop_family.recognise: inkling2_loop,
        open_family.recognise: open_attnres,
    }
    others += [build() for family, build in mine.items() if family is not recognise]
    assert [recognise(model) for model in others] == [None] * len(others)


def test_routing_parameters_are_parameters_that_decide_weights():
    """A name that is not in the model, or a parameter that is left out."""
    for build, parts in (
        (inkling2, ("attention_input.query", "mlp_input.query", "final_input.query")),
        (inkling2_loop, ("message_input.query", "q_message_gate.down_proj.weight")),
        (open_attnres, ("attn_res_proj.weight", "mlp_res_norm.weight", "attn_res_bias")),
    ):
        model = build()
        routing = find_layout(model).routing
        assert set(routing) <= dict(model.named_parameters()).keys()
        assert all(any(name.endswith(part) for name in routing) for part in parts)
