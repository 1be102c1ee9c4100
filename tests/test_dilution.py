"""Dilution measures against closed forms."""

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from hypothesis import given, settings
from hypothesis import strategies as st

import resinspect as ri
from resinspect.analysis.dilution import (
    contribution_share,
    dilution_index,
    effective_sources,
    magnitude_share,
    update_ratio,
    write_alignment,
)
from resinspect.analysis.persistence import persistence_fit, write_persistence
from resinspect.analysis.summary import summarise
from resinspect.errors import OptionError, TraceError


def sizes(trace):
    return trace["reader_prefix"].values.astype(float)


@pytest.mark.parametrize("share", [contribution_share, magnitude_share])
def test_equal_orthogonal_writes_have_equal_shares(share):
    """A share normalised over the wrong dimension, or over sources that cannot be read."""
    trace = trace_of(orthonormal(5, 9))
    values = share(trace).values
    for reader, n in enumerate(sizes(trace).astype(int)):
        np.testing.assert_allclose(values[:, reader, :n], 1 / n)
        assert np.isnan(values[:, reader, n:]).all()


@pytest.mark.parametrize("definition", ["participation", "entropy"])
def test_effective_sources_from_all_to_one(definition):
    """A count off by one, or in nats instead of sources."""
    trace = trace_of(orthonormal(5, 9))
    all_of_them = effective_sources(trace, definition=definition).values
    np.testing.assert_allclose(all_of_them, np.broadcast_to(sizes(trace), all_of_them.shape))
    newest = np.eye(9)[np.arange(9)]
    one = effective_sources(trace_of(orthonormal(5, 9), newest), definition=definition).values
    np.testing.assert_allclose(one, 1)


def test_unknown_definition_is_named():
    """A silent default."""
    with pytest.raises(OptionError, match="choose participation or entropy"):
        effective_sources(trace_of(orthonormal(1, 3)), definition="renyi")


def test_dilution_index_is_one_for_the_null_and_zero_for_a_single_source():
    """An index whose ends are not where its docstring says."""
    np.testing.assert_allclose(dilution_index(trace_of(orthonormal(5, 9))), 1)
    np.testing.assert_allclose(dilution_index(trace_of(orthonormal(5, 9), np.eye(9))), 0, atol=1e-12)


def test_equal_orthogonal_writes_fade_as_one_over_t():
    """The essay's 1/T measured as something else."""
    trace = trace_of(orthonormal(12, 9), samples=np.repeat(np.arange(3), 4))
    fit = persistence_fit(trace).set_index("quantity")
    np.testing.assert_allclose(fit.loc["exponent", ["value", "low", "high"]].astype(float), -1)
    assert fit.loc["exponent", "documents"] == 3
    assert fit.loc["exponent", "tokens"] == 12


def decaying(fastest=0.0, sources=13):
    """Weights that decay with distance by a factor of ``2 ** (-1 / 6)``, earlier writes faster by up to ``fastest``."""
    source, reader = np.arange(sources), np.arange(1, sources + 1)[:, None]
    rate = 1 / 6 + fastest * (1 - source / sources)
    weight = np.where(source < reader, 2.0 ** (-rate * (reader - 1.0 - source)), 0)
    # An embedding that makes every input equally long lets shares be the squares of the weights.
    length = (weight[:, 1:] ** 2).sum(1)
    weight[:, 0] = np.sqrt(length.max() + 1 - length)
    return trace_of(orthonormal(4, sources), weight)


def test_geometric_decay_has_its_half_life():
    """A half-life in the wrong unit, or off by the distance at which counting starts."""
    fit = persistence_fit(decaying()).set_index("quantity")
    assert fit.loc["half_life", "value"] == pytest.approx(1 + 3, abs=1e-9)
    assert fit.loc["half_life", ["sources", "limit"]].tolist() == [7, 6]
    curve = write_persistence(decaying(), limit=12)
    np.testing.assert_allclose(curve.values[:, 1:] / curve.values[:, :-1], 2 ** (-1 / 3), rtol=1e-9)
    assert curve["distance"].values.tolist() == list(range(1, 13))
    assert curve.attrs["sources"] == 1


def test_writes_that_fade_differently_are_the_same_ones_at_every_distance():
    """A curve that mixes how writes fade with which writes have readers so far away."""
    trace = decaying(fastest=0.2)
    share = contribution_share(trace).values[0]
    for limit in (3, 6, 12):
        writes = range(1, 14 - limit)
        expected = [np.mean([share[s + d - 1, s] for s in writes]) for d in range(1, limit + 1)]
        curve = write_persistence(trace, limit=limit)
        np.testing.assert_allclose(curve.values[0], expected)
        assert curve.attrs["sources"] == len(writes)
    # Of writes that do not fade at all but are smaller when late, a mean over all pairs would rise with distance.
    weight = np.where(np.arange(13) == 0, 1e3, 1.0 / np.maximum(np.arange(13), 1))
    still = write_persistence(trace_of(orthonormal(2, 13), weight)).values
    np.testing.assert_allclose(still, still[:, :1] + np.zeros(6), rtol=1e-4)


def test_readers_of_one_write_at_one_distance_count_once():
    """Queries, keys and values read thrice as often as MLPs, or two sublayers side by side at two distances."""
    trace = decaying(fastest=0.2)
    thrice = trace.isel(reader=np.repeat(np.arange(13), np.where(np.arange(13) % 2, 1, 3)))
    np.testing.assert_allclose(write_persistence(thrice), write_persistence(trace))
    side_by_side = trace.isel(reader=np.arange(0, 13, 2))
    curve, share = write_persistence(side_by_side), contribution_share(trace).values[0]
    assert curve.sizes["distance"] == 3
    assert curve.attrs["sources"] == 8
    second = [share[2 * ((s + 1) // 2) + 2, s] for s in range(1, 9)]
    np.testing.assert_allclose(curve.values[0, 1], np.mean(second))


def test_half_life_of_equal_writes_is_its_null():
    """A null of no fading, although equal orthogonal writes fade as 1 / T."""
    fit = persistence_fit(trace_of(orthonormal(12, 17), samples=np.repeat(np.arange(3), 4))).set_index("quantity")
    row = fit.loc["half_life"]
    curve = [np.mean([1 / (s + d) for s in range(1, 10)]) for d in range(1, 9)]
    assert row["value"] == pytest.approx(np.interp(-curve[0] / 2, -np.array(curve), np.arange(1, 9)))
    assert row["null"] == pytest.approx(row["value"])
    assert row["sources"] == 9
    assert fit.loc["exponent", ["sources", "limit"]].tolist() == [16, 16]
    assert np.isinf(persistence_fit(trace_of(orthonormal(2, 17)), limit=2)["value"][0])


def test_a_limit_beyond_all_readers_is_refused():
    """A mean over no write."""
    with pytest.raises(OptionError, match="distances 1 to 12"):
        write_persistence(decaying(), limit=13)
    with pytest.raises(TraceError, match="no reader comes after"):
        persistence_fit(decaying().isel(reader=[0]))


def test_one_document_has_no_interval():
    """A standard error over tokens of one text passed off as uncertainty."""
    trace = trace_of(orthonormal(6, 5))
    fit = persistence_fit(trace)
    assert np.isnan(fit[["low", "high"]].values).all()
    table = summarise(contribution_share(trace))
    assert np.isnan(table[["low", "high"]].values).all()
    assert (table["documents"].values[~np.isnan(table["mean"].values)] == 1).all()


def test_update_ratio_and_alignment_of_known_vectors():
    """The write of another sublayer, or of the input's own past."""
    writes = np.zeros((1, 3, 2))
    writes[0, 0], writes[0, 1], writes[0, 2] = (2, 0), (-1, 0), (0, 3)
    trace = trace_of(writes)
    np.testing.assert_allclose(update_ratio(trace).values, [[0.5, 3.0]])
    np.testing.assert_allclose(write_alignment(trace).values, [[-1.0, 0.0]])
    assert update_ratio(trace)["reader"].values.tolist() == ["0.attn", "0.mlp"]
    layer = update_ratio(trace, of="layer")
    np.testing.assert_allclose(layer.values, [[np.hypot(1, 3) / 2]])
    assert layer["reader"].values.tolist() == ["0.attn"]


def test_the_order_of_tokens_does_not_matter():
    """A value that depends on the token before, where the definition knows only its own."""
    generator = np.random.default_rng(4)
    trace = trace_of(generator.standard_normal((9, 5, 8)), samples=np.repeat(np.arange(3), 3))
    order = generator.permutation(9)
    for measure in (contribution_share, magnitude_share, effective_sources, dilution_index, write_persistence):
        np.testing.assert_allclose(measure(trace.isel(token=order)).values, measure(trace).values[order])
    assert persistence_fit(trace.isel(token=order))["value"].values == pytest.approx(persistence_fit(trace)["value"])


def test_layers_are_told_apart():
    """Writes of another layer, or the embedding, in a layer's update."""
    layer = update_ratio(trace_of(orthonormal(5, 7)), of="layer")
    np.testing.assert_allclose(layer.values, np.sqrt(2 / np.array([[1, 3, 5]] * 5)))
    with pytest.raises(OptionError, match="choose sublayer or layer"):
        update_ratio(trace_of(orthonormal(5, 7)), of="block")


def test_nothing_read_is_no_number_of_sources():
    """1 or infinity sources for a reader all of whose sources were left out."""
    trace = ri.select(trace_of(orthonormal(5, 5)), sources=["1.attn", "1.mlp"])
    for definition in ("participation", "entropy"):
        values = effective_sources(trace, definition=definition).sel(reader=["0.attn", "1.mlp"]).values
        assert np.isnan(values[:, 0]).all()
        np.testing.assert_allclose(values[:, 1], 1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_shares_sum_to_one_and_ignore_scale(seed, scale):
    """A share with units, or one that loses a source."""
    generator = np.random.default_rng(seed)
    writes, weight = generator.standard_normal((4, 7, 11)), generator.standard_normal((4, 7, 7))
    trace, scaled = trace_of(writes, weight), trace_of(scale * writes, weight)
    for share in (contribution_share, magnitude_share):
        np.testing.assert_allclose(share(trace).sum("source"), 1, rtol=1e-9)
        np.testing.assert_allclose(share(trace), share(scaled), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(effective_sources(trace), effective_sources(scaled), rtol=1e-6)


def test_means_weigh_tokens_and_leave_out_what_is_asked():
    """Documents weighted alike whatever their length, or the first token kept."""
    trace = trace_of(orthonormal(6, 3), samples=[0, 0, 0, 0, 1, 1])
    values = trace["reader_norm"].copy(data=np.arange(18.0).reshape(6, 3))
    assert summarise(values)["mean"].tolist() == [7.5, 8.5, 9.5]
    dropped = summarise(values, drop_first=1)
    assert dropped["mean"].tolist() == pytest.approx([np.mean([3, 6, 9, 15]) + i for i in range(3)])
    assert dropped["median"].tolist() == [7.5, 8.5, 9.5]
    assert dropped["tokens"].tolist() == [4, 4, 4]
    assert dropped["reader"].tolist() == ["0.attn", "0.mlp", "final"]


def test_interval_covers_as_often_as_it_says():
    """A bootstrap over tokens: far too narrow when tokens of a document go together."""
    generator, covered = np.random.default_rng(0), 0
    trace = trace_of(orthonormal(400, 3), samples=np.repeat(np.arange(40), 10))
    for seed in range(60):
        values = np.repeat(generator.standard_normal(40), 10)[:, None] + np.zeros(3)
        row = summarise(trace["reader_norm"].copy(data=values), seed=seed, resamples=300).iloc[0]
        covered += row["low"] <= 0 <= row["high"]
    assert 50 <= covered <= 60


def test_missing_variable_says_how_to_get_it():
    """A KeyError from inside a measure."""
    with pytest.raises(TraceError, match=r"needs the variable 'cross'.*keep=\(\"cross\""):
        contribution_share(trace_of(orthonormal(2, 3)).drop_vars("cross"))
