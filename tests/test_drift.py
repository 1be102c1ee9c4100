"""Drift of profiles, information on token classes, and loss, against closed forms."""

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.stats import spearmanr

import resinspect as ri
from resinspect.analysis.class_information import class_information
from resinspect.analysis.difficulty import routing_and_loss, routing_deviation
from resinspect.analysis.drift import routing_drift
from resinspect.analysis.tokens import label_tokens, token_classes
from resinspect.errors import OptionError, TraceError

DOCUMENTS, LENGTH = 20, 30
SAMPLES = np.repeat(np.arange(DOCUMENTS), LENGTH)
TOKENS = SAMPLES.size


def reading(source, *, loss=None, samples=SAMPLES):
    """A trace whose last reader reads one source per token, the others all they have."""
    weight = np.ones((len(source), 3, 3))
    weight[:, 2] = np.eye(3)[source]
    return trace_of(np.ones((len(source), 3, 2)), weight, samples=samples, loss=loss)


def final(frame, **where):
    for name, value in {"reader": "final", **where}.items():
        frame = frame[frame[name] == value]
    return frame.iloc[0]


LAST = np.arange(TOKENS) % LENGTH == LENGTH - 1


def noise(seed=0, loss=None):
    loss = None if loss is None else np.where(LAST, np.nan, loss)
    weight = np.random.default_rng(seed).uniform(size=(TOKENS, 5, 5))
    return trace_of(np.ones((TOKENS, 5, 2)), weight, samples=SAMPLES, loss=loss)


def test_tokens_that_read_two_sources_in_turn_differ_by_one_bit():
    """Nats, or a divergence between documents that are alike."""
    frame = routing_drift(reading(np.arange(TOKENS) % 2), domains={d: d % 2 for d in range(DOCUMENTS)})
    assert final(frame, between="tokens")["divergence"] == pytest.approx(1)
    assert final(frame, between="tokens")["share"] == pytest.approx(1)
    assert final(frame, between="documents")["divergence"] == pytest.approx(0, abs=1e-12)
    assert final(frame, between="domains")["divergence"] == pytest.approx(0, abs=1e-12)
    assert final(frame, reader="0.mlp", between="tokens")["divergence"] == pytest.approx(0, abs=1e-12)
    assert final(frame, reader="all", between="tokens")["divergence"] == pytest.approx(0.5)


def test_domains_that_read_different_sources_differ_by_one_bit():
    """Domains of samples and of tokens mixed up; an interval that repeated documents pull down."""
    frame = routing_drift(reading(SAMPLES % 2), domains={d: d % 2 for d in range(DOCUMENTS)})
    for between in ("tokens", "documents", "domains"):
        row = final(frame, between=between)
        assert row["divergence"] == pytest.approx(1)
        assert row["low"] <= 1 <= row["high"]
        assert between == "tokens" or row["null_high"] < 0.5
    row = final(frame, between="domains")
    assert (row["groups"], row["documents"], row["tokens"]) == (2, DOCUMENTS, TOKENS)


def test_interval_lies_around_the_value():
    """Resamples with repeated documents, which are less diverse than documents, taken as they are."""
    weight = np.random.default_rng(0).exponential(size=(8, 9, 9))[np.repeat(np.arange(8), 5)]
    trace = trace_of(np.ones((40, 9, 2)), weight, samples=np.repeat(np.arange(8), 5))
    row = final(routing_drift(trace), reader="all", between="documents")
    # Eight resampled documents differ by an eighth less.
    assert (row["low"] + row["high"]) / 2 == pytest.approx(row["divergence"], rel=0.05)


def test_two_equal_groups_give_the_usual_divergence():
    """Another divergence under the same name."""
    trace = noise()
    values = trace["weight"].values[:, 4, :]
    groups = [(values / values.sum(-1, keepdims=True))[g == SAMPLES % 2].mean(0) for g in (0, 1)]
    row = final(routing_drift(trace, domains={d: d % 2 for d in range(DOCUMENTS)}), between="domains")
    assert row["divergence"] == pytest.approx(jensenshannon(*groups, base=2) ** 2)


def test_documents_of_noise_diverge_as_much_as_chance():
    """The upward bias of a divergence between finite samples, taken for drift."""
    found = [final(routing_drift(noise(seed), seed=seed), between="documents") for seed in range(5)]
    assert np.mean([row["divergence"] / row["null_mean"] for row in found]) == pytest.approx(1, abs=0.1)
    assert all(row["null_mean"] > 0 for row in found)


def test_documents_of_other_lengths_do_not_drift():
    """A null that shuffles over positions: longer documents have more late tokens, which read otherwise."""
    samples = np.repeat(np.arange(DOCUMENTS), np.where(np.arange(DOCUMENTS) % 2, 7, 60))
    trace = reading(np.zeros_like(samples), samples=samples)
    late = (trace["position"].values >= 7).astype(int)
    row = final(routing_drift(reading(late, samples=samples)), between="documents")
    assert row["divergence"] > 0.05
    assert row["divergence"] == pytest.approx(row["null_mean"])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), share=st.sampled_from(["weight", "magnitude"]))
def test_divergences_are_nested_and_bounded(seed, share):
    """A divergence between documents above that between their tokens."""
    frame = routing_drift(
        noise(seed), share=share, domains={d: d % 3 for d in range(DOCUMENTS)}, permutations=2, resamples=10
    )
    wide = frame.pivot(index="reader", columns="between", values="divergence")
    assert (wide["tokens"] >= wide["documents"] - 1e-12).all()
    assert (wide["documents"] >= wide["domains"] - 1e-12).all()
    assert frame["share"].dropna().between(0, 1).all()
    assert (wide["tokens"] <= np.log2(5)).all()


def test_classes_that_decide_the_source_tell_all_of_it():
    """Information in nats, or of the wrong reader."""
    source = np.random.default_rng(0).integers(0, 3, TOKENS)
    row = final(class_information(reading(source), classes=[f"class {s}" for s in source]))
    assert row["plug_in"] == pytest.approx(row["entropy"])
    assert row["information"] == pytest.approx(np.log2(3), abs=0.05)
    assert row["low"] < row["information"] < row["high"] + 1e-12
    assert row["classes"] == 3


def test_the_largest_weight_need_not_be_the_longest_contribution():
    """An option that is taken and not used: the class decides which write is long, not which weight is large."""
    kind = np.random.default_rng(0).integers(0, 2, TOKENS)
    writes = np.ones((TOKENS, 3, 2))
    writes[:, 1] = np.where(kind, 10, 0.1)[:, None]
    trace = trace_of(writes, np.array([[1, 0, 0], [1, 0.5, 0], [0.6, 0.5, 0.1]]), samples=SAMPLES)
    by_weight, by_length = (final(class_information(trace, classes=kind, share=s)) for s in ("weight", "magnitude"))
    assert by_weight["information"] == by_weight["entropy"] == 0
    assert by_length["entropy"] == pytest.approx(1, abs=0.01)
    assert by_length["information"] == pytest.approx(1, abs=0.05)
    assert class_information(trace, share="magnitude").attrs["share"] == "magnitude"


def test_independent_classes_tell_nothing():
    """The positive bias of the plug-in estimate, taken for information."""
    generator, found = np.random.default_rng(1), []
    for seed in range(20):
        classes = generator.integers(0, 12, TOKENS).astype(str)
        trace = reading(generator.integers(0, 3, TOKENS))
        found.append(final(class_information(trace, classes=classes, permutations=20, resamples=50, seed=seed)))
    assert np.mean([row["plug_in"] for row in found]) > 0.02
    assert abs(np.mean([row["information"] for row in found])) < 0.004
    assert sum(row["information"] > row["null_high"] for row in found) <= 4


def test_what_only_the_document_decides_is_no_information_of_the_class():
    """Classes and sources that go together because each document has its own of both."""
    row = final(class_information(reading(SAMPLES % 3), classes=(SAMPLES % 3).astype(str)))
    assert row["plug_in"] > 1.5
    assert row["information"] == pytest.approx(0, abs=1e-9)


def test_classes_of_known_tokens():
    """A word after a line break called a continuation; a digit called punctuation."""
    text = ["The", " cat", "s", ",", "and", "\n", "Two", " 2", "x", "3", "▁sat", "Ġon", "on", " ", "—", "é"]
    trace = reading(np.zeros(len(text), dtype=int), samples=np.zeros(len(text), dtype=int))
    trace = trace.assign_coords(text=("token", np.array(text, dtype=object)))
    start, more, mark = "word start", "continuation", "punctuation"
    expected = ["first", start, more, mark, start, "whitespace", start, "digit", more, "digit", start, start, more]
    assert token_classes(trace).values.tolist() == [*expected, "whitespace", mark, start]


def test_labels_of_positions():
    """Bins off by one, or halves of the packed trace instead of the document."""
    labels = label_tokens(reading(np.zeros(12, dtype=int), samples=np.repeat([3, 7], [8, 4])), drop_first=1)
    assert labels.place.tolist() == [1, 1, 2, 2, 2, 2, 3, 1, 1, 2]
    assert labels.half.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1]
    assert labels.documents == 2


def test_a_measure_that_ranks_as_the_loss_has_rho_one():
    """A correlation over documents, or of values instead of ranks."""
    generator = np.random.default_rng(0)
    loss = generator.exponential(size=TOKENS)
    trace = noise(loss=loss)
    measure = trace["reader_norm"].copy(data=np.exp(loss)[:, None] * [1, -1, 1, 1, 0])
    # A shift of whole documents must not matter.
    measure = measure + 100 * trace["sample"]
    table = routing_and_loss(trace, measures={"m": measure}).set_index("reader")
    np.testing.assert_allclose(table["rho"].iloc[:4], [1, -1, 1, 1])
    assert np.isnan(table.loc["final", "rho"])
    np.testing.assert_allclose(table.loc["0.attn", ["low", "high"]].astype(float), 1)
    # Within 29 tokens a shuffle keeps the mean loss of 5 position bins.
    assert table.loc["0.attn", "null_mean"] == pytest.approx(5 / 29, abs=0.05)
    one = trace.isel(token=slice(0, LENGTH))
    found = routing_and_loss(one, measures={"d": routing_deviation(one)}).set_index("reader").loc["final"]
    expected = spearmanr(one["loss"][:-1], routing_deviation(one).sel(reader="final")[:-1]).statistic
    assert found["rho"] == pytest.approx(expected)
    assert np.isnan(found["low"])


def test_noise_and_position_are_in_the_null():
    """What position alone brings about, called an association of routing with difficulty."""
    place = np.log2(np.tile(np.arange(LENGTH), DOCUMENTS) + 1).astype(int)
    covered = inside = 0
    for seed in range(20):
        trace = noise(seed, loss=place + np.random.default_rng(seed + 99).standard_normal(TOKENS))
        row = routing_and_loss(trace, measures={"d": routing_deviation(trace)}).set_index("reader").loc["all"]
        covered += row["low"] < 0 < row["high"]
        inside += row["null_low"] < row["rho"] < row["null_high"]
    assert min(covered, inside) >= 16
    with_place = trace["loss"].copy(data=place + np.random.default_rng(3).standard_normal(TOKENS))
    row = routing_and_loss(trace, measures={"d": with_place}).iloc[0]
    assert row["rho"] > 0.3
    assert row["null_mean"] == pytest.approx(row["rho"], abs=0.1)
    assert row["null_low"] < row["rho"] < row["null_high"]


def test_loss_of_the_token_itself_is_that_of_the_one_before():
    """A shift over the border of documents, or the wrong way."""
    loss = np.random.default_rng(0).uniform(size=TOKENS)
    trace = noise(loss=loss)
    before = np.where(np.arange(TOKENS) % LENGTH == 0, 0, np.roll(loss, 1))
    table = routing_and_loss(trace, measures={"m": trace["loss"].copy(data=before)}, loss_of="current")
    assert table["rho"].iloc[0] == pytest.approx(1)
    assert table["tokens"].iloc[0] == TOKENS - DOCUMENTS


def test_deviation_of_static_and_doubled_routing():
    """A distance with units, or from another token's mean."""
    assert (routing_deviation(trace_of(orthonormal(4, 5))).values == 0).all()
    weight = np.where(np.arange(4) < 2, 0.5, 1.5)[:, None, None] * np.ones((3, 3))
    np.testing.assert_allclose(routing_deviation(trace_of(np.ones((4, 3, 2)), weight)), 0.5)


@pytest.mark.parametrize("name", ["hyper_connections", "dca", "ddl", "post_ln", "denseformer"])
def test_every_kind_of_map_is_measured(name):
    """Scalar, per-channel and conditional maps, q/k/v readers, documents of one token."""
    model = build(NAMED[name], "random")
    trace = ri.capture(model, prompts_for(model, (9, 4, 17, 1, 12)))
    drift = routing_drift(trace)
    assert (drift.loc[drift["between"] == "tokens", "divergence"].max() > 1e-6) == (name != "denseformer")
    assert (class_information(trace)["plug_in"] <= class_information(trace)["entropy"] + 1e-9).all()
    deviation = routing_and_loss(trace).set_index(["quantity", "reader"]).loc[("deviation", "all"), "rho"]
    assert np.isnan(deviation) == (name == "denseformer")


def test_wrong_options_are_named():
    """A silent default, or a KeyError from inside a measure."""
    trace = noise()
    for measure in (routing_drift, class_information):
        with pytest.raises(OptionError, match="choose magnitude, weight or contribution"):
            measure(trace, share="norm")
        with pytest.raises(OptionError, match="no distribution; choose magnitude or weight"):
            measure(trace, share="contribution")
    with pytest.raises(OptionError, match="one label for each of 600 tokens"):
        class_information(trace, classes=["a"])
    with pytest.raises(TraceError, match="needs the variable 'loss'"):
        routing_and_loss(trace)
    with pytest.raises(OptionError, match="choose next or current"):
        routing_and_loss(noise(loss=np.zeros(TOKENS)), loss_of="last")
