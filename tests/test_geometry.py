"""Geometry measures against closed forms and against the vectors themselves."""

import numpy as np
import pytest
import torch
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st

import resinspect as ri
from resinspect.analysis.activations import collective_rank, massive_activations
from resinspect.analysis.geometry import (
    angular_distance,
    block_influence,
    norm_growth,
    novelty,
    reader_cosine,
    residual_norms,
)
from resinspect.errors import OptionError, TraceError

DOCUMENTS = np.repeat(np.arange(3), 4)


def single(trace):
    """The trace with its second-order variables as a float32 capture stores them."""
    return trace.assign({name: trace[name].astype(np.float32) for name in ("gram", "cross", "weight", "source_norm")})


@pytest.fixture(scope="module", params=["pre_ln", "attnres", "hyper_connections", "ddl", "dca", "post_ln"])
def captured(request):
    """A float32 trace with vectors, of scalar schemes and of others."""
    model = build(NAMED[request.param], "random")
    with torch.no_grad():
        return ri.capture(model, prompts_for(model), keep=("gram", "cross", "hidden"))


def test_equal_orthogonal_writes_grow_as_the_root_of_depth():
    """A slope of the variance passed off as one of the norm, or the embedding counted as depth 1 of the writes."""
    trace = trace_of(orthonormal(12, 9), samples=DOCUMENTS)
    table = residual_norms(trace).set_index(["quantity", "name"])
    np.testing.assert_allclose(table.loc["reader", "mean"], np.sqrt(np.arange(1, 10)))
    np.testing.assert_allclose(table.loc["write", "mean"], 1)
    assert table.loc["reader", "depth"].tolist() == list(range(1, 10))
    assert table.loc["write", "depth"].tolist() == list(range(9))
    growth = norm_growth(trace).set_index(["quantity", "axis"])
    reader = growth.loc[("reader", "log depth")]
    np.testing.assert_allclose(reader[["slope", "low", "high", "null", "r2"]].astype(float), [0.5, 0.5, 0.5, 0.5, 1])
    np.testing.assert_allclose(growth["slope"], growth["null"], atol=1e-12)


def test_exponential_growth_is_straight_in_depth():
    """The two axes swapped, or a fit to mean norms where tokens differ in scale by orders of magnitude."""
    scale = 10.0 ** np.arange(12)[:, None, None]
    trace = trace_of(scale * orthonormal(12, 9) * np.exp(0.3 * np.arange(9))[:, None], np.eye(9), samples=DOCUMENTS)
    growth = norm_growth(trace).set_index(["quantity", "axis"])
    for quantity in ("reader", "write"):
        assert growth.loc[(quantity, "depth"), "slope"] == pytest.approx(0.3)
        assert growth.loc[(quantity, "depth"), "r2"] == pytest.approx(1)
        assert growth.loc[(quantity, "log depth"), "r2"] < 0.95


def test_one_document_has_no_interval():
    """Uncertainty from the tokens of one text."""
    trace = trace_of(orthonormal(6, 5), hidden=True)
    assert np.isnan(norm_growth(trace)[["low", "high"]].values).all()
    assert np.isnan(residual_norms(trace)[["low", "high"]].values).all()
    assert np.isnan(collective_rank(trace)[["entropy_low", "participation_high"]].values).all()


def test_novelty_of_orthogonal_duplicated_and_mixed_writes():
    """A projection on the previous write only, on later writes too, or not divided by the write's length."""
    writes = 7 * orthonormal(5, 5)
    np.testing.assert_allclose(novelty(trace_of(writes)), 1)
    writes[:, 2] = -3 * writes[:, 0]
    writes[:, 4] = writes[:, 0] + writes[:, 1] + np.sqrt(2) * writes[:, 4]
    np.testing.assert_allclose(novelty(trace_of(writes)).values, np.tile([1, 1, 0, 1, np.sqrt(0.5)], (5, 1)))


def test_novelty_from_single_precision_stays_below_its_floor():
    """A rounded pivot divided by: everything after a dependent write is noise, or NaN from a root of less than 0."""
    generator = np.random.default_rng(0)
    writes = generator.standard_normal((200, 9, 16))
    writes[:, 3] = writes[:, :3].sum(1)
    writes[:, 6] = writes[:, 5] * 1e4
    values = novelty(single(trace_of(writes)))
    assert values.attrs["floor"] < 5e-3
    assert (values.values[:, [3, 6]] == 0).all()
    others = [0, 1, 2, 4, 5, 7, 8]
    basis = [np.linalg.qr(w[others].T)[1].diagonal() / np.linalg.norm(w[others], axis=1) for w in writes]
    np.testing.assert_allclose(values.values[:, others], np.abs(basis), atol=1e-4)


def test_novelty_of_a_zero_write_is_not_a_number():
    """0 / 0 given as 0 or 1, or spoiling the writes after it."""
    writes = orthonormal(3, 5)
    writes[:, 1] = 0
    values = novelty(trace_of(writes)).values
    assert np.isnan(values[:, 1]).all()
    np.testing.assert_allclose(values[:, [0, 2, 3, 4]], 1)


def test_geometry_equals_that_of_the_vectors(captured):
    """Weights used where W is no scalar, or readers and sources mixed up."""
    read, written = (captured[name].values.astype(np.float64) for name in ("reader_hidden", "source_hidden"))
    unit = read / np.linalg.norm(read, axis=-1, keepdims=True)
    expected = unit @ unit.swapaxes(1, 2)
    np.testing.assert_allclose(reader_cosine(captured).values, expected, atol=1e-5)
    # arccos turns a rounding of the cosine next to 1 into its root.
    angle = np.arccos(np.clip(expected, -1, 1)) / np.pi
    np.testing.assert_allclose(angular_distance(captured).values, angle, atol=1e-3)
    pivots = np.stack([np.linalg.qr(w.T)[1].diagonal() for w in written])
    np.testing.assert_allclose(novelty(captured), np.abs(pivots) / np.linalg.norm(written, axis=-1), atol=1e-4)
    top = np.abs(read).max(-1)
    found = massive_activations(captured, channel_share=0, times_median=0)
    assert len(found) == top.size
    assert found["maximum"].iloc[0] == pytest.approx(top.max())
    np.testing.assert_allclose(np.sort(found["over_rms"]), np.sort((top / np.sqrt((read**2).mean(-1))).ravel()), 1e-5)


def test_block_influence_of_known_layers(captured):
    """Attention held against the MLP of its own layer, or the last layer left out."""
    trace = trace_of(orthonormal(4, 9))
    values = block_influence(trace)
    sizes = np.array([1, 3, 5, 7, 9])
    np.testing.assert_allclose(values, np.tile(1 - np.sqrt(sizes[:-1] / sizes[1:]), (4, 1)))
    np.testing.assert_allclose(values["null"], values[0])
    assert values["reader"].values.tolist() == ["0.attn", "1.attn", "2.attn", "3.attn"]
    first = [reader for reader in captured["reader"].values if reader.endswith(("attn", "attn.q", "final", "final.q"))]
    cosine = reader_cosine(captured)
    influence = block_influence(captured)
    assert influence["reader"].values.tolist() == first[:3]
    for here, after in zip(first, [*first[1:4], first[-1]][:3], strict=False):
        expected = 1 - cosine.sel(reader=here, reader2=after)
        np.testing.assert_allclose(influence.sel(reader=here), expected, atol=1e-12)


def test_cosine_that_the_gram_matrix_does_not_resolve_is_not_given():
    """Inputs whose writes cancel 1 : 100,000: a float32 Gram matrix gives any number."""
    writes = orthonormal(50, 5, width=8)
    writes[:, 1] = 1e5 * writes[:, 2]
    weight = np.tril(np.ones((5, 5)))
    writes[:, 2] = writes[:, 2] - writes[:, 1]
    values = reader_cosine(single(trace_of(writes, weight))).values
    assert np.isnan(values[:, 2:, 2:]).all()
    assert not np.isnan(values[:, :2, :2]).any()


def test_angles_of_equal_orthogonal_and_opposite_inputs():
    """Angles in radians, or a NaN from a cosine rounded above 1."""
    writes = np.ones((1, 3, 2)) * [[1.0], [-2.0], [1.0]]
    writes[0, 2] = (1, -1)
    values = angular_distance(trace_of(writes, np.eye(3))).values[0]
    np.testing.assert_allclose(values, [[0, 1, 0.5], [1, 0, 0.5], [0.5, 0.5, 0]], atol=1e-7)


def test_massive_activations_are_found_with_their_token():
    """A threshold on the wrong quantity, or a token named after the row of the table."""
    writes = np.random.default_rng(0).standard_normal((40, 3, 64))
    trace = trace_of(writes, samples=np.repeat(np.arange(4), 10))
    assert massive_activations(trace).empty
    writes[13, 1, 5] = -300
    found = massive_activations(trace_of(writes, samples=np.repeat(np.arange(4), 10)))
    assert set(found["reader"]) == {"0.mlp", "final"}
    assert found[["sample", "position", "text"]].drop_duplicates().values.tolist() == [[1, 3, "t13"]]
    assert (found["maximum"].between(290, 310)).all()
    assert (found["over_rms"] <= 8).all()
    assert (found["over_rms"] > 7.9).all()
    assert found.attrs == {"channel_share": 0.5, "times_median": 5.0, "looked_at": 120}
    del trace.attrs["hidden_size"]
    with pytest.raises(TraceError, match="'hidden_size'"):
        massive_activations(trace)


def test_rank_of_known_covariances():
    """Uncentred moments (a constant offset is no direction), a root of eigenvalues, a sum that counts the embedding."""
    base = np.sqrt(4) * np.concatenate([np.eye(4), -np.eye(4)])
    tokens = np.tile(base, (30, 1))
    writes = np.stack([tokens, 50 + tokens * [1, 1, 0, 0], tokens * [2, 1, 0, 0]], axis=1)
    trace = trace_of(writes, samples=np.repeat(np.arange(30), 8), hidden=True)
    table = collective_rank(trace).set_index("name")
    np.testing.assert_allclose(table.loc["embed", ["entropy", "participation"]].astype(float), 4)
    np.testing.assert_allclose(table.loc["0.attn", ["entropy", "participation"]].astype(float), 2)
    np.testing.assert_allclose(table.loc["0.mlp", "participation"], 25 / 17)
    np.testing.assert_allclose(table.loc["all sublayers", "participation"], 2 + 25 / 17)
    np.testing.assert_allclose(table["participation_low"], table["participation"], rtol=1e-6)
    assert (table["documents"] == 30).all()
    assert (table["tokens"] == 240).all()
    assert collective_rank(trace, of="reader")["name"].tolist() == ["0.attn", "0.mlp", "final"]
    with pytest.raises(OptionError, match="choose source or reader"):
        collective_rank(trace, of="token")
    with pytest.raises(TraceError, match="source_hidden"):
        collective_rank(trace.drop_vars("source_hidden"))


def test_unit_vectors_keep_one_token_from_deciding_the_rank():
    """unit=True that does nothing, or scales channels instead of tokens."""
    generator = np.random.default_rng(0)
    writes = generator.standard_normal((500, 3, 8))
    writes[7] *= 1e4
    trace = trace_of(writes, samples=np.repeat(np.arange(5), 100), hidden=True)
    assert collective_rank(trace).loc[0, "participation"] < 1.01
    assert collective_rank(trace, unit=True).loc[0, "participation"] > 7.5
    assert np.isnan(collective_rank(trace_of(np.ones((8, 3, 2)), hidden=True))["entropy"]).all()


def test_rank_of_a_stored_trace_is_that_in_memory(tmp_path):
    """Chunks that overlap, or tokens left out of the wrong chunk."""
    generator = np.random.default_rng(1)
    trace = trace_of(generator.standard_normal((2500, 3, 5)), samples=np.repeat(np.arange(10), 250), hidden=True)
    ri.save_trace(trace, tmp_path / "trace")
    lazy = collective_rank(ri.open_trace(tmp_path / "trace"), drop_first=3)
    kept = trace["source_hidden"].values[trace["position"].values >= 3]
    values = np.linalg.eigvalsh(np.cov(kept[:, 1].T, bias=True))
    assert lazy.loc[1, "participation"] == pytest.approx(values.sum() ** 2 / (values**2).sum(), rel=1e-6)
    assert lazy.loc[1, "tokens"] == 2470


def test_interval_of_the_rank_covers():
    """An interval over tokens where tokens of a document go together, or a bootstrap's downward bias."""
    generator, scale, covered = np.random.default_rng(0), np.array([3.0, 2, 1, 1]), 0
    truth = (2 * scale**2).sum() ** 2 / ((2 * scale**2) ** 2).sum()
    for _ in range(60):
        documents = np.repeat(generator.standard_normal((60, 3, 4)), 10, axis=0)
        writes = scale * (documents + generator.standard_normal((600, 3, 4)))
        table = collective_rank(trace_of(writes, samples=np.repeat(np.arange(60), 10), hidden=True))
        covered += table.loc[0, "participation_low"] <= truth <= table.loc[0, "participation_high"]
    assert 50 <= covered <= 60


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_angles_and_novelty_ignore_scale_and_order_of_tokens(seed, scale):
    """A measure with units, or one that looks at other tokens."""
    generator = np.random.default_rng(seed)
    writes, weight = generator.standard_normal((6, 5, 9)), generator.standard_normal((6, 5, 5))
    order = generator.permutation(6)
    for measure in (novelty, reader_cosine, angular_distance, block_influence):
        values = measure(trace_of(writes, weight)).values
        np.testing.assert_allclose(measure(trace_of(scale * writes, weight)).values, values, atol=1e-6)
        np.testing.assert_allclose(measure(trace_of(writes[order], weight[order])).values, values[order], atol=1e-12)
    values = novelty(trace_of(writes, weight)).values
    assert ((values >= 0) & (values <= 1)).all()


@pytest.mark.parametrize("measure", [novelty, reader_cosine, angular_distance, block_influence])
def test_missing_gram_says_how_to_get_it(measure):
    """A KeyError from inside a measure."""
    with pytest.raises(TraceError, match=r"needs the variable 'gram'.*keep=\(\"gram\""):
        measure(trace_of(orthonormal(2, 5)).drop_vars("gram"))
