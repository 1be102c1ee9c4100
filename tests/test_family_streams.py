"""Parallel streams: each deliberate mistake must show, and the weights must be those of the closed forms."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_families import PROMPTS, everything_in_float64
from tiny.streams import CASES
from transformers import Glm5NextTextModel
from xarray import Dataset

import resinspect as ri
from resinspect.errors import CaptureError
from resinspect.families import deepseek_v4, find_layout, glm5_next, hy_v4, qwen4_exp
from resinspect.families.qwen4_exp import GatedStreams

BUILD = {tiny.name: tiny.build for tiny in CASES}
RECOGNISERS = (deepseek_v4.recognise, glm5_next.recognise, hy_v4.recognise, qwen4_exp.recognise)


def mutated(layout, native, change, only=None):
    """The layout with one native changed, at sites of one kind or at all."""
    kinds = [site.kind for site in layout.anatomy.sites]

    def mutate(tap):
        hit = tap.event.what == "native" and tap.event.name == native and only in (None, kinds[tap.event.index])
        return replace(tap, pick=lambda seen: change(tap.pick(seen))) if hit else tap

    return replace(layout, taps=tuple(map(mutate, layout.taps)))


def verdict(monkeypatch, model, layout):
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            return ri.fidelity_summary(ri.capture(model, PROMPTS))["verdict"]
        except CaptureError as error:
            return "refused" if "the map is wrong" in str(error) else str(error)


def coarse(name, native, change, only=None):
    return pytest.param(name, native, change, only, id=f"{name}-{native}-{only or 'all'}-{change.__name__}")


def transposed(matrix):
    return matrix.mT


def dropped(weights):
    return torch.ones_like(weights)


def summed(weights):
    return weights * weights.shape[2]


def rescaled(weights):
    return weights * 2 / 1.5


MISTAKES = [
    coarse("deepseek_v4", "mix", transposed),
    coarse("deepseek_v4", "post", dropped),
    coarse("deepseek_v4", "pre", dropped, "final"),
    coarse("glm5_next", "mix", transposed),
    coarse("glm5_next", "pre", summed, "final"),
    coarse("hy_v4", "post", rescaled),  # magnitude 2, as in DeepSeek-V4
    coarse("hy_v4_vl", "pre", dropped),
    coarse("qwen4_exp", "gate", summed),
    coarse("qwen4_exp", "rstd", dropped),
    coarse("qwen4_exp_ngrams", "post", dropped),
]


@pytest.mark.parametrize(("name", "native", "change", "only"), MISTAKES)
def test_a_mistake_in_the_weights_shows(name, native, change, only, monkeypatch):
    """A fidelity check that a transposed matrix, a sum for a mean or a dropped weight passes."""
    model = BUILD[name]()
    assert verdict(monkeypatch, model, find_layout(model)) == "exact"
    assert verdict(monkeypatch, model, mutated(find_layout(model), native, change, only)) in ("off", "refused")


EPSILONS = [("deepseek_v4", "pre"), ("glm5_next", "pre"), ("hy_v4", "pre"), ("hy_v4", "post"), ("hy_v4_vl", "post")]


@pytest.mark.parametrize(("name", "native"), EPSILONS)
def test_a_missing_epsilon_shows_in_float64(name, native, monkeypatch):
    """A weight without its 1e-6, which only float64 can see."""
    model = BUILD[name]().double()
    model.set_experts_implementation("eager")
    with everything_in_float64():
        layout = find_layout(model)
        assert verdict(monkeypatch, model, layout) == "exact"
        without = mutated(layout, native, lambda weights: weights - 1e-6, "mlp")
        assert verdict(monkeypatch, model, without) in ("off", "refused")


def test_zero_centred_gains_show(monkeypatch):
    """A norm whose gain is taken as w instead of 1 + w."""
    model = BUILD["qwen4_exp"]()
    layout = find_layout(model)
    wrong = replace(layout, connection=GatedStreams([gain - 1 for gain in layout.connection.gains]))
    assert verdict(monkeypatch, model, wrong) in ("off", "refused")


def test_ngrams_in_the_wrong_stream_show(monkeypatch):
    """The vectors of an n-gram module added to each other's streams."""
    model = BUILD["qwen4_exp_ngrams"]()
    layout = find_layout(model)
    right = layout.connection.write

    def swapped(carrier, state, site, native, *values):
        return right(carrier, state, site, native, *(values[::-1] if site.kind == "ple" else values))

    monkeypatch.setattr(layout.connection, "write", swapped)
    assert verdict(monkeypatch, model, layout) in ("off", "refused")


def native(trace: Dataset, name: str, site: str) -> np.ndarray:
    return trace[f"native_{name}"].values[:, list(trace["site"].values).index(site)].astype(float)


@pytest.mark.parametrize("name", ["hy_v4", "hy_v4_vl"])
def test_unmixed_streams_have_a_closed_form(name):
    """W that decays or mixes on its way: here it is ``<pre, post>``, and ``sum pre`` for the embedding."""
    trace = ri.capture(BUILD[name](), PROMPTS, keep=("natives",))
    for r, reader in enumerate(trace["reader"].values):
        pre = native(trace, "pre", reader)
        sources = trace["source"].values[1 : int(trace["reader_prefix"][r])]
        expected = [pre.sum(-1), *((pre * native(trace, "post", source)).sum(-1) for source in sources)]
        found = trace["weight"].values[:, r, : len(expected)]
        np.testing.assert_allclose(found, np.stack(expected, axis=-1), rtol=1e-6)


def test_every_stream_keeps_the_embedding_whole():
    """A matrix whose rows, not columns, sum to 1: the embedding's weight would drift from ``sum pre``."""
    trace = ri.capture(BUILD["deepseek_v4"](), PROMPTS, keep=("natives",))
    for reader in trace["reader"].values:
        expected = native(trace, "pre", reader).sum(-1)
        np.testing.assert_allclose(trace["weight"].sel(reader=reader, source="embed"), expected, rtol=1e-4)
    final = ri.capture(BUILD["glm5_next"](), PROMPTS)["weight"].sel(reader="final", source="embed")
    np.testing.assert_allclose(final, 1, rtol=1e-4)


def test_rows_of_mixed_streams_follow_the_recursion():
    """A write that enters before its own sublayer's mixing, or a matrix applied once too often."""
    trace = ri.capture(BUILD["deepseek_v4"](), PROMPTS, keep=("natives",))
    readers, post = list(trace["reader"].values), native(trace, "post", "0.attn")
    for mixed in readers[1:-1]:
        found = trace["weight"].sel(reader=mixed, source="0.attn").values
        np.testing.assert_allclose(found, (native(trace, "pre", mixed) * post).sum(-1), rtol=1e-5)
        post = np.einsum("tnm,tm->tn", native(trace, "mix", mixed), post)


def test_weights_per_channel_have_a_closed_form():
    """A best scalar or a discarded share that do not belong to ``mean_n gate_n (1 + w_n) rstd_n C_n`` per channel."""
    model = BUILD["qwen4_exp_ngrams"]()
    trace = ri.capture(model, PROMPTS, keep=("natives", "hidden"))
    gain = 1 + model.model.hyper_connection_mixer.hc_norm.weight.detach().view(3, 32).double().numpy()
    read = native(trace, "gate", "final") * gain * native(trace, "rstd", "final")[..., None] / 3
    for s, source in enumerate(map(str, trace["source"].values)):
        if source.endswith(".ple"):
            carried = np.eye(3)[int(source[-5])][None].repeat(len(read), 0)
        else:
            carried = np.ones(read.shape[:2]) if source == "embed" else native(trace, "post", source)
        v = trace["source_hidden"].values[:, s].astype(float)
        term = (read * carried[..., None]).sum(1) * v
        best = (term * v).sum(-1) / (v * v).sum(-1)
        rest = np.linalg.norm(term - best[:, None] * v, axis=-1) / np.linalg.norm(term, axis=-1)
        at = {"reader": "final", "source": source}
        np.testing.assert_allclose(trace["weight"].sel(at), best, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(trace["discarded"].sel(at), rest, rtol=1e-4)
        assert rest.min() > 0.05


def test_each_layer_with_ngrams_has_a_source_for_every_stream():
    """N-grams counted from the wrong layer (the configuration counts from 1), or as one vector for all streams."""
    anatomy = find_layout(BUILD["qwen4_exp_ngrams"]()).anatomy
    assert [source.name for source in anatomy.sources if source.kind == "ple"] == [
        f"{layer}.stream{n}.ple" for layer in (0, 2) for n in range(3)
    ]
    assert [reader.name for reader in anatomy.readers[:3]] == ["0.attn", "0.mlp", "1.attn"]
    assert anatomy.readers[0].prefix == 4


def test_a_bare_text_model_is_recognised():
    """Paths that need a model around the trunk."""
    model = BUILD["glm5_next"]()
    bare = model.model.language_model
    assert isinstance(bare, Glm5NextTextModel)
    ours, theirs = (ri.capture(m, PROMPTS)["weight"].values for m in (bare, model))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", BUILD)
def test_routing_names_all_parameters_of_the_streams(name):
    """A parameter that decides the routing and is missing from the list."""
    model = BUILD[name]()
    marks = ("attn_hc.", "ffn_hc.", "hc_head.", "_hyper_connection.", "hyper_connection_mixer.")
    expected = {path for path, _ in model.named_parameters() if any(mark in path for mark in marks)}
    assert set(find_layout(model).routing) == expected


@pytest.mark.parametrize("name", BUILD)
def test_a_layer_with_one_part_more_is_not_recognised(name):
    """A variant of the architecture that reads or writes once more, taken for the one that is known."""
    model = BUILD[name]()
    layers = next(m for path, m in model.named_modules() if path.endswith("layers") and "visual" not in path)
    layers[1].extra = torch.nn.Linear(2, 2)
    assert not any(recognise(model) for recognise in RECOGNISERS)


@pytest.mark.parametrize("name", ["deepseek_v4", "hy_v4"])
def test_other_shapes_are_not_recognised(name):
    """A connection with more weights than the program uses."""
    model = BUILD[name]()
    hc = model.model.layers[1].ffn_hc
    hc.base = torch.nn.Parameter(torch.zeros(len(hc.base) + 1))
    assert not any(recognise(model) for recognise in RECOGNISERS)
