"""Profiles, contrasts, groups and comparisons against closed forms and against noise."""

import numpy as np
import pytest
import torch
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_score

import resinspect as ri
from resinspect.analysis.clustering import silhouettes
from resinspect.analysis.groups import profile_clusters, profile_groups, profile_map
from resinspect.analysis.profiles import (
    embedding_share,
    expected_lag,
    locality,
    profile_entropy,
    readership,
    reading_profile,
)
from resinspect.analysis.similarity import compare
from resinspect.analysis.specialization import attention_mlp_contrast, ends_against_middle, semiseparable_rank
from resinspect.errors import OptionError, TraceError

BY_READER = [locality, embedding_share, expected_lag, profile_entropy]
READS = np.arange(17)


def noisy(weight, *, documents=10, each=5, jitter=0.05, seed=0):
    """Documents whose weights differ a little from the given ``(reader, source)``."""
    generator, sources = np.random.default_rng(seed), weight.shape[1]
    factor = np.exp(jitter * generator.standard_normal((documents, *weight.shape)))
    samples = np.repeat(np.arange(documents), each)
    return trace_of(orthonormal(len(samples), sources), weight * np.repeat(factor, each, axis=0), samples=samples)


def alternating(strength, seed=0):
    """Attention reads the embedding, MLPs the newest source, beside uniform reading with noise."""
    generator = np.random.default_rng(seed)
    weight = np.tril(np.exp(0.2 * generator.standard_normal((17, 17)))) / np.arange(1, 18)[:, None]
    weight[READS, np.where(READS % 2, READS, 0)] += strength
    return weight


def test_profiles_of_uniform_and_one_hot_reading():
    """A profile over the wrong dimension, a distance off by one, or a null that is not what uniform reading gives."""
    uniform, newest = trace_of(orthonormal(3, 9)), trace_of(orthonormal(3, 9), np.eye(9))
    sizes = np.arange(1.0, 10)
    for share in ("magnitude", "weight", "contribution"):
        over_source = reading_profile(uniform, share=share)
        np.testing.assert_allclose(over_source.sum("source"), 1)
        np.testing.assert_allclose(over_source[:, 4, :5], 0.2)
        assert np.isnan(over_source[:, 4, 5:]).all()
        over_distance = reading_profile(newest, share=share, over="distance")
        np.testing.assert_allclose(over_distance.sel(distance=1), 1)
        np.testing.assert_allclose(over_distance[:, 8, 1:], 0, atol=1e-12)
    for measure in (locality, embedding_share, expected_lag):
        values = measure(uniform)
        np.testing.assert_allclose(values["null"], (sizes + 1) / 2 if measure is expected_lag else 1 / sizes)
        np.testing.assert_allclose(values[:, 1:], np.tile(values["null"][1:], (3, 1)))
        assert np.isnan(values[:, 0]).all(), "the first reader has no choice"
    np.testing.assert_allclose(profile_entropy(uniform)[:, 1:], 1)
    np.testing.assert_allclose(locality(newest)[:, 1:], 1)
    np.testing.assert_allclose(embedding_share(newest)[:, 1:], 0)
    np.testing.assert_allclose(expected_lag(newest)[:, 1:], 1)
    np.testing.assert_allclose(profile_entropy(newest)[:, 1:], 0, atol=1e-12)


def test_readership_sums_to_one_over_readers():
    """A source's readers normalised over sources, or an unread write given a readership."""
    weight = np.tril(np.ones((5, 5)))
    weight[:, 2] = 0
    weight[4] = [0, 1, 0, 0, 0]
    trace = trace_of(orthonormal(2, 5), weight)
    values = readership(trace)
    assert values.dims == ("token", "source", "reader")
    np.testing.assert_allclose(values.sel(source="0.attn")[0, 1:], np.array([1 / 2, 1 / 2, 1 / 3, 1]) / (7 / 3))
    assert np.isnan(values.sel(source="0.attn")[0, 0])
    assert np.isnan(values.sel(source="0.mlp")).all()
    at = readership(trace, over="distance")
    np.testing.assert_allclose(at.sel(source="0.attn")[0, :4], np.array([1 / 2, 1 / 2, 1 / 3, 1]) / (7 / 3))
    assert np.isnan(at.sel(source="0.attn")[0, 4])


@pytest.mark.parametrize("case", ["attnres", "hyper_connections", "ddl", "dca", "post_ln"])
def test_profiles_of_real_schemes_come_from_their_contributions(case):
    """Scalar weights used where W is none, or readers q, k, v of one place mixed up."""
    model = build(NAMED[case], "random")
    with torch.no_grad():
        trace = ri.capture(model, prompts_for(model), keep=("gram", "cross", "hidden"))
    if "contribution_norm" in trace:
        size = np.nan_to_num(trace["contribution_norm"].values.astype(np.float64))
    else:
        weight = np.nan_to_num(trace["weight"].values.astype(np.float64))
        size = np.abs(weight) * np.linalg.norm(trace["source_hidden"].values.astype(np.float64), axis=-1)[:, None]
    share = size / size.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.nan_to_num(reading_profile(trace).values), share, atol=1e-5)
    away = trace["reader_prefix"].values[:, None] - np.arange(trace.sizes["source"])
    by_distance = reading_profile(trace, over="distance")
    for reader in range(trace.sizes["reader"]):
        for source in range(trace["reader_prefix"].values[reader]):
            here = by_distance.sel(distance=away[reader, source])[:, reader]
            np.testing.assert_allclose(here, share[:, reader, source], atol=1e-5)
    spread = readership(trace, over="distance").sum("distance").values
    np.testing.assert_allclose(spread[share.sum(1) > 0], 1, atol=1e-9)


def test_contrast_of_alike_readers_is_zero_and_of_others_is_known():
    """A contrast that is only that MLPs have one source more."""
    samples = np.repeat(np.arange(4), 5)
    alike = attention_mlp_contrast(trace_of(orthonormal(20, 9), samples=samples))
    np.testing.assert_allclose(alike[["contrast", "low", "high", "null"]], 0, atol=1e-12)
    assert (alike["layers"] == 3).all(), "the first attention has no choice"
    weight = np.eye(9)
    weight[::2] = np.eye(9)[[0] * 5]
    table = attention_mlp_contrast(trace_of(orthonormal(20, 9), weight, samples=samples)).set_index("quantity")
    attn, mlp = 1 / np.array([3, 5, 7]), 1 / np.array([4, 6, 8])
    assert table.loc["locality over uniform", "contrast"] == pytest.approx(np.mean(-attn - (1 - mlp)))
    assert table.loc["embedding share over uniform", "contrast"] == pytest.approx(np.mean(1 - attn + mlp))
    expected = np.mean(np.array([3, 5, 7]) / [2, 3, 4]) - np.mean(1 / np.array([2.5, 3.5, 4.5]))
    assert table.loc["relative expected lag", "contrast"] == pytest.approx(expected)
    assert (table["documents"] == 4).all()
    trace = trace_of(orthonormal(2, 9)).assign_coords(reader_kind=("reader", ["moe"] * 9))
    with pytest.raises(TraceError, match="no layer has readers of kinds attn and mlp"):
        attention_mlp_contrast(trace)


def test_claim_of_the_ends_holds_where_it_is_true_only():
    """A claim confirmed by uniform reading, by the embedding alone, or with an interval from one text."""
    samples = np.repeat(np.arange(4), 3)
    uniform = ends_against_middle(trace_of(orthonormal(12, 9), samples=samples))
    np.testing.assert_allclose(uniform["excess"], 0, atol=1e-12)
    assert uniform.attrs["holds"] is False
    ends = np.tril(np.full((9, 9), 0.1))
    ends[:, 0] = ends[np.arange(9), np.arange(9)] = 2
    assert ends_against_middle(noisy(ends), newest=1).attrs["holds"] is True
    assert ends_against_middle(noisy(ends).isel(token=slice(0, 5))).attrs["holds"] is None
    alone = np.tril(np.full((9, 9), 0.1))
    alone[:, 0] = 2
    table = ends_against_middle(noisy(alone), newest=1)
    assert table.attrs["holds"] is False
    excess = table.set_index("part")["excess"]
    assert excess["embedding"] > 0 > excess["newest"]
    assert excess["both"] == pytest.approx(-excess["between"])
    assert excess["embedding"] + excess["newest"] == pytest.approx(excess["both"])


def test_ends_of_each_reader():
    """Readers without a middle counted, or rows in another order than their labels."""
    table = ends_against_middle(trace_of(orthonormal(4, 9), np.eye(9)), newest=2, each_reader=True)
    assert table["reader"].unique().tolist() == ["1.mlp", "2.attn", "2.mlp", "3.attn", "3.mlp", "final"]
    newest = table[table["part"] == "newest"]
    np.testing.assert_allclose(newest["share"], 1)
    np.testing.assert_allclose(newest["uniform"], 2 / np.arange(4, 10))
    with pytest.raises(TraceError, match="choose fewer newest"):
        ends_against_middle(trace_of(orthonormal(4, 3)), newest=3)


def test_rank_of_known_maps():
    """Blocks that leave out the newest source, or a rank that counts zeros."""
    plain = semiseparable_rank(trace_of(orthonormal(3, 9)))
    np.testing.assert_allclose(plain, 1)
    assert plain["full"].values.tolist() == [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert plain["cut"].values.tolist() == list(range(1, 10))
    generator = np.random.default_rng(0)
    two = np.einsum("trk,tsk->trs", *generator.standard_normal((2, 3, 9, 2)))
    rank = semiseparable_rank(trace_of(orthonormal(3, 9), two), definition="tolerance")
    assert rank.values[0].tolist() == [1, 2, 2, 2, 2, 2, 2, 2, 1]
    full = semiseparable_rank(trace_of(orthonormal(3, 9), generator.standard_normal((3, 9, 9))), definition="tolerance")
    np.testing.assert_array_equal(full, np.tile(full["full"], (3, 1)))
    # Equal singular values: the effective rank is their number.
    equal = np.zeros((5, 5))
    equal[2:, :3] = np.eye(3)
    assert semiseparable_rank(trace_of(orthonormal(1, 5), equal)).sel(cut=3).item() == pytest.approx(3)


def test_rank_is_bounded_by_streams():
    """A block that no stream boundary corresponds to: more than n ranks for n streams."""
    model = build(NAMED["hyper_connections"], "random", torch.float64)
    with torch.no_grad():
        trace = ri.capture(model, prompts_for(model))
    rank = semiseparable_rank(trace, definition="tolerance", tolerance=1e-9)
    assert rank.max() == 4
    assert rank.sizes["token"] == trace.sizes["token"]
    assert semiseparable_rank(trace, tokens=5).sizes["token"] == 5


def test_unknown_weights_stay_unknown():
    """A weight that a solve could not identify counted as zero."""
    weight = np.tile(np.tril(np.ones((5, 5))), (2, 1, 1))
    weight[0, 3, 1] = np.nan
    trace = trace_of(orthonormal(2, 5), weight)
    for measure in BY_READER:
        values = measure(trace).values
        assert np.isnan(values[0, 3])
        assert not np.isnan(values[1, 1:]).any()
    assert np.isnan(readership(trace)[0, 1, 1:]).all()
    rank = semiseparable_rank(trace)
    assert np.isnan(rank.values[0]).tolist() == [False, True, True, True, False]


def test_two_groups_are_found():
    """Groups by depth instead of by profile."""
    trace = noisy(alternating(0.5))
    evidence = profile_groups(trace).set_index("groups")
    assert evidence.loc[2, "accepted"]
    assert evidence.loc[2, "stability"] > 0.95
    table = profile_clusters(trace)
    assert table.attrs["groups"] == 2
    assert table["group"].tolist() == [0 if kind == "mlp" else 1 for kind in table["kind"]]
    place = profile_map(trace)
    assert sum(place.attrs["explained"]) > 0.5
    mlp = place["kind"] == "mlp"
    assert (
        place.loc[mlp, "x"].min() > place.loc[~mlp, "x"].max() or place.loc[mlp, "x"].max() < place.loc[~mlp, "x"].min()
    )


def test_groups_of_sources():
    """Sources grouped by what their sublayers read, or the embedding counted as a sublayer."""
    generator = np.random.default_rng(0)
    weight = np.tril(np.exp(0.2 * generator.standard_normal((17, 17))))
    weight[:, 2::2] *= 4
    table = profile_clusters(noisy(weight), of="source")
    assert table.attrs["groups"] == 2
    assert table["group"].tolist() == [int(kind == "mlp") for kind in table["kind"]]
    assert table["name"].iloc[0] == "0.attn"


@pytest.mark.parametrize("of", ["reader", "source"])
def test_noise_has_no_groups(of):
    """Groups of anything: silhouettes of noise, of readers with few sources, of gradual change, are not zero."""
    found = 0
    for seed in range(8):
        generator = np.random.default_rng(seed)
        weight = np.zeros((17, 17))
        for reader in READS:
            weight[reader, : reader + 1] = generator.dirichlet(np.full(reader + 1, 5.0))
            if seed % 3 == 0:
                weight[reader, [0, reader]] += [reader / 16, 1 - reader / 16]
        found += profile_clusters(noisy(weight, seed=seed), of=of, seed=seed, resamples=40).attrs["groups"] > 0
    assert found <= 1


def test_one_that_reads_otherwise_is_no_group():
    """A single odd reader reported as a specialization of sublayers."""
    weight = np.tril(np.exp(0.1 * np.random.default_rng(0).standard_normal((17, 17))))
    weight[9, 9] = 1000
    evidence = profile_groups(noisy(weight), largest=2).iloc[0]
    assert evidence["silhouette"] > 0.5
    assert not evidence["accepted"]


def test_sampling_noise_and_rounding_have_no_groups():
    """Groups of profiles that differ between documents more than between readers, or by rounding."""
    assert profile_clusters(noisy(np.tril(np.ones((17, 17))), jitter=0.5)).attrs["groups"] == 0
    plain = trace_of(orthonormal(20, 17), samples=np.repeat(np.arange(4), 5))
    table = profile_clusters(plain)
    assert table.attrs["groups"] == 0
    assert (table["group"] == -1).all()
    assert np.isnan(profile_map(plain).attrs["explained"]).all()
    rounded = np.tril(np.ones((17, 17))) / np.arange(1, 18)[:, None]
    rounded[READS, np.where(READS % 2, READS, 0)] += 1e-10
    assert profile_clusters(noisy(rounded, jitter=0)).attrs["groups"] == 0


def test_one_document_has_no_groups_and_no_intervals():
    """A stability or an interval from resampling one text."""
    trace = noisy(alternating(0.5), documents=1, each=20)
    evidence = profile_groups(trace)
    assert evidence["stability"].isna().all()
    assert not evidence["accepted"].any()
    assert attention_mlp_contrast(trace)[["low", "high"]].isna().values.all()
    table = compare({"a": trace, "b": trace})
    assert table[["low", "high", "agreement_low", "agreement_high"]].isna().values.all()


def test_silhouette_is_that_of_scikit_learn():
    """Own clusters averaged with the point itself, or singletons given 1."""
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((12, 3))
    groupings = [generator.integers(0, k, 12) for k in (2, 3, 5)] + [np.r_[0, np.ones(11, dtype=int)]]
    np.testing.assert_allclose(silhouettes(rows, groupings), [silhouette_score(rows, g) for g in groupings])
    assert np.isnan(silhouettes(rows, [np.zeros(12, dtype=int)])).all()


def test_comparison_of_the_same_and_of_opposite_traces():
    """Similarity of a trace with itself below 1, readers matched in reverse, or an interval beside its estimate."""
    local, far = noisy(alternating(0.5), seed=1), noisy(alternating(0.5)[:, ::-1] * np.tri(17), seed=2)
    table = compare({"a": local, "same": local, "other": far}).set_index(["a", "b", "kind"])
    same = table.loc[("a", "same", "all")]
    assert same[["similarity", "low", "high", "agreement"]].tolist() == pytest.approx([1, 1, 1, 1])
    assert same["shuffled"] < 0.98
    assert same["paired"]
    assert same["readers"] == 16
    other = table.loc[("a", "other", "all")]
    assert other["similarity"] < same["uniform"] < 1
    assert other["low"] <= other["similarity"] <= other["high"]
    assert table.index.get_level_values("kind").unique().tolist() == ["all", "mlp", "attn", "final"]


def test_comparison_aligns_models_of_different_depth():
    """Layer 3 of 4 held against layer 3 of 8."""

    def gradual(layers):
        sources = 2 * layers + 1
        depth = np.linspace(0, 1, sources)
        return np.tril(0.2 + np.exp(-8 * (depth[:, None] / 2 - depth[None]) ** 2))

    small, large = noisy(gradual(4), seed=1), noisy(gradual(16), seed=2, documents=6)
    row = compare({"small": small, "large": large}).set_index("kind").loc["all"]
    assert row["similarity"] > 0.97
    assert row["similarity"] > row["shuffled"] + 0.03
    assert not row["paired"]
    assert row[["documents_a", "documents_b", "readers"]].tolist() == [10, 6, 8]


def test_depths_between_readers_are_interpolated():
    """The nearest reader taken instead: two models with one law of depth that differ by their number of layers."""

    def lawful(layers):
        weight = np.tril(np.ones((2 * layers + 1, 2 * layers + 1)))
        for reader in range(1, len(weight)):
            depth = (reader - 1) // 2 / (layers - 1)
            weight[reader, 1 : reader + 1] = (1 - depth / 2) / reader
            weight[reader, 0] = depth / 2
        return noisy(weight, jitter=0)

    table = compare({"four": lawful(4), "six": lawful(6)}).set_index("kind")
    assert table.loc["mlp", "similarity"] == pytest.approx(1)


def test_uniform_reading_agrees_on_nothing():
    """Two plain residuals called alike: by construction, not by learning."""
    plain = trace_of(orthonormal(20, 9), samples=np.repeat(np.arange(4), 5))
    row = compare({"a": plain, "b": plain}, share="weight").iloc[0]
    assert row["similarity"] == pytest.approx(1)
    assert row["uniform"] == pytest.approx(1)
    assert np.isnan(row["agreement"])


def test_views_of_a_sublayer_are_one_reader():
    """Queries, keys and values counted three times, or no comparison of a model with views and one without."""
    traces = {}
    for case in ("dca", "attnres"):
        model = build(NAMED[case], "random")
        with torch.no_grad():
            traces[case] = ri.capture(model, prompts_for(model))
    row = compare(traces).iloc[0]
    assert row["readers"] == 6
    assert compare({"a": traces["dca"], "b": traces["dca"]})["readers"].iloc[0] == 6
    assert row["paired"]
    assert 0 < row["low"] <= row["high"] <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda trace: reading_profile(trace, share="sum"), "choose magnitude, weight or contribution"),
        (lambda trace: reading_profile(trace, over="depth"), "choose source or distance"),
        (lambda trace: expected_lag(trace, share="contribution"), "choose magnitude or weight"),
        (lambda trace: locality(trace, newest=0), "at least 1"),
        (lambda trace: ends_against_middle(trace, newest=0), "at least 1"),
        (lambda trace: semiseparable_rank(trace, definition="exact"), "choose effective or tolerance"),
        (lambda trace: semiseparable_rank(trace, tokens=0), "at least 1"),
        (lambda trace: profile_map(trace, of="token"), "choose reader or source"),
        (lambda trace: compare({"a": trace}), "at least two traces"),
        (lambda trace: compare({"a": trace, "b": trace}, bins=0), "at least 1"),
    ],
)
def test_options_that_are_not_allowed_are_named(call, message):
    """A silent default, or a numpy error from within."""
    with pytest.raises(OptionError, match=message):
        call(trace_of(orthonormal(4, 9)))


def test_too_few_readers_and_nothing_in_common():
    """Groups of three, or an empty table."""
    with pytest.raises(TraceError, match="at least four readers"):
        profile_groups(trace_of(orthonormal(4, 3)))
    trace = trace_of(orthonormal(4, 5))
    other = trace.assign_coords(reader_kind=("reader", ["x"] * 5))
    with pytest.raises(TraceError, match="none in common"):
        compare({"a": trace, "b": other})


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_profiles_ignore_scale_and_order_of_tokens(seed, scale):
    """A profile with units, or one that looks at other tokens."""
    generator = np.random.default_rng(seed)
    writes, weight = generator.standard_normal((6, 5, 7)), generator.standard_normal((6, 5, 5))
    order = generator.permutation(6)
    trace = trace_of(writes, weight)
    for measure in (*BY_READER, reading_profile, readership, semiseparable_rank):
        values = measure(trace).values
        np.testing.assert_allclose(measure(trace_of(scale * writes, weight)).values, values, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(measure(trace_of(writes[order], weight[order])).values, values[order], rtol=1e-9)
    assert ((profile_entropy(trace)[:, 1:] >= 0) & (profile_entropy(trace)[:, 1:] <= 1 + 1e-12)).all()
    lag, n = expected_lag(trace)[:, 1:], np.arange(2, 6)
    assert ((lag >= 1) & (lag <= n)).all()
