"""Measures of parallel streams against closed forms, and against W."""

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from cases import Case, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY

import resinspect as ri
from resinspect.analysis.mixing import STRUCTURE, stream_mixing
from resinspect.analysis.stream_routing import (
    cancellation_index,
    stream_coefficients,
    stream_specific_routing,
    stream_specificity,
)
from resinspect.analysis.streams import (
    least_stream_gain,
    second_singular_value,
    stream_deviation,
    stream_distance,
    stream_gain,
)
from resinspect.errors import OptionError, TraceError

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18]]
SPANS = ("single", "from_start", "to_end")
MIXED = ["hyper_connections", "hyper_connections_static", "mhc"]


def captured(name):
    """A tiny model of another family, or a skip where its package is missing."""
    try:
        model = next(case for case in TINY if case.name == name).build()
    except (ImportError, AttributeError) as error:
        pytest.skip(f"{name} cannot be built here: {error}")
    return ri.capture(model, PROMPTS, keep=("natives",))


def mixed(matrices, tokens=3):
    """A trace whose streams are mixed by these matrices, one for each sublayer or ``(token, sublayer, n, n)``."""
    matrices = np.asarray(matrices, dtype=float)
    matrices = np.broadcast_to(matrices, (tokens, *matrices.shape[-3:]))
    sites = matrices.shape[1]
    full = np.concatenate([matrices, np.full_like(matrices[:, :1], np.nan)], axis=1)
    writes = orthonormal(tokens, sites + 1)
    return trace_of(writes, natives={"native_mix": (("token", "site", "stream", "stream2"), full)})


def streamed(name, **options):
    """A reference model far from its start, captured."""
    model = build(Case("mhc" if name == "mhc" else "hyper_connections", name, options), "random")
    return ri.capture(model, prompts_for(model), keep=("natives",))


DYNAMIC = {"hyper_connections": {}, "hyper_connections_static": {"dynamic": False}, "mhc": {}}


@pytest.fixture(scope="module")
def traces():
    return {name: streamed(name, **options) for name, options in DYNAMIC.items()}


@pytest.mark.parametrize("span", SPANS)
def test_no_mixing_is_the_null_of_every_measure(span):
    """A measure whose null is not where its docstring says."""
    trace = mixed([np.eye(4)] * 6)
    for direction in ("forward", "backward"):
        np.testing.assert_allclose(stream_gain(trace, direction=direction, span=span), 1)
        np.testing.assert_allclose(least_stream_gain(trace, direction=direction, span=span), 1)
    for sums in ("rows", "columns"):
        np.testing.assert_allclose(stream_deviation(trace, sums=sums, span=span), 0)
    np.testing.assert_allclose(second_singular_value(trace, span=span), 1)
    np.testing.assert_allclose(stream_distance(trace, to="identity", span=span), 0)
    np.testing.assert_allclose(stream_distance(trace, to="uniform", span=span), np.sqrt(3))


def test_gains_of_a_known_matrix():
    """Rows taken for columns, the largest for the least, or signs lost before the sum."""
    matrix = np.array([[2.0, -3.0], [0.5, 0.25]])
    trace = mixed([matrix, np.eye(2)])
    at = {"site": "0.attn"}
    assert stream_gain(trace).sel(at)[0] == 1.0
    assert stream_gain(trace, absolute=True).sel(at)[0] == 5.0
    assert stream_gain(trace, direction="backward").sel(at)[0] == 2.75
    assert least_stream_gain(trace).sel(at)[0] == 0.75
    assert least_stream_gain(trace, direction="backward").sel(at)[0] == 2.5
    assert stream_deviation(trace).sel(at)[0] == 2.0
    assert stream_deviation(trace, sums="columns").sel(at)[0] == 3.75
    np.testing.assert_allclose(
        second_singular_value(trace).sel(at)[0], np.linalg.svd(matrix, compute_uv=False)[1], rtol=1e-12
    )
    np.testing.assert_allclose(stream_distance(trace, to="identity").sel(at)[0], np.linalg.norm(matrix - np.eye(2)))
    assert stream_gain(trace)["site"].values.tolist() == ["0.attn", "0.mlp"]


def test_products_run_in_the_order_of_depth():
    """A composite multiplied from the wrong side, or without its own sublayer."""
    generator = np.random.default_rng(0)
    m = generator.standard_normal((5, 4, 3, 3))
    trace = mixed(m, tokens=5)
    start, end = stream_mixing(trace, span="from_start").values, stream_mixing(trace, span="to_end").values
    np.testing.assert_allclose(start[:, 2], m[:, 2] @ m[:, 1] @ m[:, 0])
    np.testing.assert_allclose(end[:, 1], m[:, 3] @ m[:, 2] @ m[:, 1])
    np.testing.assert_allclose(start[:, -1], end[:, 0])


def test_products_are_per_token_before_any_average():
    """The product of mean matrices: here it is 0, while every token's own product has gain 1."""
    signs = np.array([1.0, -1.0])[:, None, None, None] * np.eye(2)
    trace = mixed(np.concatenate([signs, signs], axis=1), tokens=2)
    np.testing.assert_allclose(stream_gain(trace, span="from_start").isel(site=-1), 1)
    assert np.all(trace["native_mix"].mean("token").isel(site=0) == 0)


def test_blurred_streams():
    """A distance or a singular value that does not see that all streams hold the same."""
    trace = mixed([np.full((4, 4), 0.25)] * 2)
    np.testing.assert_allclose(stream_distance(trace), 0, atol=1e-12)
    np.testing.assert_allclose(second_singular_value(trace), 0, atol=1e-12)
    np.testing.assert_allclose(stream_distance(trace, to="identity"), np.sqrt(3))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), n=st.integers(2, 5))
def test_relabelled_streams_change_nothing(seed, n):
    """A measure that depends on the order of the streams."""
    generator = np.random.default_rng(seed)
    m, order = generator.standard_normal((2, 4, n, n)), generator.permutation(n)
    trace, other = mixed(m, tokens=2), mixed(m[:, :, order][:, :, :, order], tokens=2)
    for span in SPANS:
        for measure in (stream_gain, least_stream_gain, stream_deviation, second_singular_value, stream_distance):
            np.testing.assert_allclose(measure(trace, span=span), measure(other, span=span), rtol=1e-6, atol=1e-9)
        assert (least_stream_gain(trace, span=span) <= stream_gain(trace, span=span) + 1e-12).all()


def test_what_mhc_fixes_is_marked_and_the_rest_is_not(traces):
    """A structural sum of 1 reported as a finding, or a measured one passed off as structural."""
    mhc, free = traces["mhc"], traces["hyper_connections"]
    for span in SPANS:
        assert stream_gain(mhc, span=span).attrs["guaranteed"]
        assert stream_deviation(mhc, span=span).attrs["guaranteed"]
        np.testing.assert_allclose(stream_gain(mhc, span=span), 1, atol=1e-5)
        np.testing.assert_allclose(stream_deviation(mhc, span=span), 0, atol=1e-5)
        assert not stream_gain(mhc, direction="backward", span=span).attrs["guaranteed"]
        assert not stream_deviation(mhc, sums="columns", span=span).attrs["guaranteed"]
        assert not stream_gain(free, span=span).attrs["guaranteed"]
    assert stream_distance(mhc, span="from_start").attrs["guaranteed"]
    assert not stream_distance(mhc).attrs["guaranteed"]
    assert cancellation_index(mhc).attrs["guaranteed"]
    np.testing.assert_allclose(np.nan_to_num(cancellation_index(mhc)), 0, atol=1e-6)
    assert not cancellation_index(free).attrs["guaranteed"]


@pytest.mark.parametrize(
    ("name", "sums"),
    [("deepseek_v4", "rows"), ("glm5_next", "rows"), ("own_mhc", "columns"), ("own_mhc_v2", "columns")],
)
def test_what_families_fix_is_so(name, sums):
    """A table of guarantees that is wrong about a family's Sinkhorn."""
    trace = captured(name)
    assert "sinkhorn" in STRUCTURE[trace.attrs["family"], trace.attrs["scheme"]]
    found = stream_deviation(trace, sums=sums)
    assert found.attrs["guaranteed"]
    np.testing.assert_allclose(found, 0, atol=1e-4)
    assert (trace["native_mix"].fillna(0) >= 0).all()
    np.testing.assert_allclose(np.nan_to_num(cancellation_index(trace)), 0, atol=1e-6)


def test_streams_that_never_mix_are_guaranteed_not_to():
    """A gain of 1 reported for a scheme that has nothing to gain by."""
    trace = captured("hy_v4")
    for span in SPANS:
        gain = stream_gain(trace, span=span)
        np.testing.assert_array_equal(gain, 1)
        assert gain.attrs["guaranteed"].startswith("streams are never mixed")
    assert stream_gain(trace)["site"].size == len(trace["site"]) - 1
    rest = stream_specific_routing(trace)
    assert np.nanmax(np.abs(rest.values[:, :, 1:])) > 1e-3
    np.testing.assert_allclose(rest.sel(source="embed"), 0, atol=1e-5)


def test_altup_has_single_mixing_only():
    """A product of predictions that leaves out the corrections between them."""
    trace = captured("gemma3n")
    mixing = stream_mixing(trace)
    sites = [site for site in trace["site"].values if site.endswith("attn")]
    assert mixing["site"].values.tolist() == sites
    predict = trace["native_predict"].sel(site=sites).values
    np.testing.assert_allclose(mixing, predict + np.eye(4))
    with pytest.raises(TraceError, match='span="single"'):
        stream_gain(trace, span="from_start")


@pytest.mark.parametrize("name", MIXED)
def test_coefficients_of_streams_add_up_to_w(name, traces):
    """A write that enters before its sublayer's mixing, or a stream read with another's weight."""
    trace = traces[name]
    found = stream_coefficients(trace).sum("stream", skipna=False)
    weight = trace["weight"].transpose(*found.dims)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(weight))
    np.testing.assert_allclose(found.fillna(0), weight.fillna(0), rtol=1e-4, atol=1e-4 * float(np.abs(weight).max()))


@pytest.mark.parametrize("name", ["deepseek_v4", "glm5_next", "hy_v4"])
def test_coefficients_of_families_add_up_to_w(name):
    """A readout whose own weights of the streams were taken for a plain sum."""
    trace = captured(name)
    found = stream_coefficients(trace).sum("stream", skipna=False)
    np.testing.assert_allclose(found, trace["weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["own_hc", "own_hc_hand", "own_mhc"])
def test_coefficients_of_the_package_add_up_to_w(name):
    """An axis of input views taken for streams."""
    trace = captured(name)
    found = stream_coefficients(trace).sum("stream", skipna=False)
    np.testing.assert_allclose(found, trace["weight"], rtol=1e-3, atol=1e-4)


def test_a_readout_per_channel_has_no_coefficients():
    """The best scalar of a readout per channel taken for a sum over streams."""
    trace = captured("own_hc_pool")
    found = cancellation_index(trace)
    assert np.isnan(found.sel(reader="final")).all()
    assert not np.isnan(found.isel(reader=-2, source=0)).any()


def streams_trace(pre, post, mix):
    """A trace of one layer: two sublayers and the readout, n streams, one token; W by hand."""
    pre, post, mix = (np.asarray(x, dtype=float) for x in (pre, post, mix))
    n = pre.shape[-1]
    first = mix[0] @ np.ones(n)
    states = [
        np.stack([np.ones(n)]),
        np.stack([first, post[0]]),
        np.stack([mix[1] @ first, mix[1] @ post[0], post[1]]),
    ]
    weight = np.zeros((3, 3))
    for reader, (read, state) in enumerate(zip((*pre, np.ones(n)), states, strict=True)):
        weight[reader, : len(state)] = state @ read
    rows = {"pre": pre, "post": post, "mix": mix}
    natives = {
        f"native_{name}": (
            ("token", "site", "stream", "stream2")[: value.ndim + 1],
            np.concatenate([value, np.full_like(value[:1], np.nan)])[None],
        )
        for name, value in rows.items()
    }
    return trace_of(orthonormal(1, 3), weight, natives=natives)


def test_cancellation_of_known_coefficients():
    """An index of something else than signs: two streams of opposite sign, unequal and equal."""
    trace = streams_trace([[1, 0], [1, 1]], [[3, -1], [1, -1]], [np.eye(2)] * 2)
    found = cancellation_index(trace).isel(token=0)
    assert found.sel(reader="0.mlp", source="0.attn") == pytest.approx(0.5)
    assert found.sel(reader="final", source="0.mlp") == pytest.approx(1.0)
    assert found.sel(reader="final", source="embed") == 0
    assert np.isnan(found.sel(reader="0.attn", source="0.attn"))


def test_routing_through_one_blurred_stream_is_not_stream_specific():
    """A residual from rank one where every stream holds the same, and one that has to be there."""
    uniform = np.full((2, 2), 0.5)
    blurred = streams_trace([[0.2, 0.9], [0.6, 0.1]], [[1, 2], [0.3, 0.1]], [uniform] * 2)
    rest = stream_specific_routing(blurred).isel(token=0)
    np.testing.assert_allclose(rest.sel(reader="final"), 0, atol=1e-12)
    own_stream = streams_trace([[1, 0], [1, 0]], [[1, 0], [0, 1]], [np.eye(2)] * 2)
    rest = stream_specific_routing(own_stream).isel(token=0)
    assert rest.sel(reader="0.mlp", source="0.attn") == pytest.approx(1 - 0.5)
    assert stream_specificity(own_stream).isel(token=0).sel(reader="0.mlp") == pytest.approx(0.5)
    assert np.isnan(stream_specificity(own_stream).isel(token=0).sel(reader="0.attn"))


def test_hyper_connections_start_as_one_gated_residual():
    """Stream-specific routing found in a model at initialisation, which has none."""
    model = build(Case("hyper_connections", "hyper_connections"), "init")
    trace = ri.capture(model, prompts_for(model), keep=("natives",))
    np.testing.assert_allclose(stream_specific_routing(trace).fillna(0), 0, atol=1e-5)
    np.testing.assert_allclose(cancellation_index(trace).fillna(0), 0, atol=1e-6)
    np.testing.assert_allclose(stream_distance(trace, to="identity", span="to_end"), 0, atol=1e-5)


def test_refusals():
    """A KeyError, or numbers for a scheme without streams."""
    trace = trace_of(orthonormal(2, 3))
    with pytest.raises(TraceError, match=r"native_mix.*several streams.*natives"):
        stream_gain(trace)
    with pytest.raises(TraceError, match=r"native_pre.*several streams"):
        cancellation_index(trace)
    known = mixed([np.eye(2)] * 2)
    with pytest.raises(OptionError, match="choose one of single, from_start, to_end"):
        stream_gain(known, span="all")
    with pytest.raises(OptionError, match="choose forward or backward"):
        stream_gain(known, direction="up")
    with pytest.raises(OptionError, match="choose rows or columns"):
        stream_deviation(known, sums="diagonals")
    with pytest.raises(OptionError, match="choose identity or uniform"):
        stream_distance(known, to="zero")
    wrong = streams_trace([[1, 0], [1, 1]], [[3, -1], [1, -1]], [np.eye(2)] * 2)
    wrong["weight"] = wrong["weight"] + 1
    with pytest.raises(TraceError, match="do not give its W"):
        cancellation_index(wrong)
