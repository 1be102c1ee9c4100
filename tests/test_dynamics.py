"""Variance of routing and staticness against planted effects and closed forms."""

import numpy as np
import pytest
from analysis_cases import trace_of
from cases import NAMED, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st

import resinspect as ri
from resinspect.analysis.staticness import staticness
from resinspect.analysis.tokens import label_tokens, shuffles
from resinspect.analysis.variance import variance_of_routing
from resinspect.errors import OptionError, TraceError

DOCUMENTS, LENGTH, TYPES, SOURCES = 30, 40, 60, 5


def planted(seed=0, *, static=1.0, position=0.0, token=0.0, domain=0.0, document=0.0, context=1.0, own=False):
    """Weights as a sum of centred effects of the given standard deviations; ``own``: no document shares a type."""
    generator = np.random.default_rng(seed)
    samples = np.repeat(np.arange(DOCUMENTS), LENGTH)
    ids = generator.integers(0, TYPES, samples.size) + (TYPES * samples if own else 0)
    place = np.log2(np.tile(np.arange(LENGTH), DOCUMENTS) + 1).astype(int)

    def effect(size, labels):
        values = generator.standard_normal((int(labels.max()) + 1, SOURCES, SOURCES))[labels]
        return size * (values - values.mean(0) * labels.any())

    labels = [np.zeros_like(ids), place, ids, samples % 3, samples, np.arange(ids.size)]
    sizes = [static, position, token, domain, document, context]
    weight = sum(effect(size, label) for size, label in zip(sizes, labels, strict=True))
    return trace_of(np.ones((ids.size, SOURCES, 2)), weight, samples=samples, token_ids=ids)


def total(trace, **options):
    domains = {d: f"domain {d % 3}" for d in range(DOCUMENTS)}
    frame = variance_of_routing(trace, **{"domains": domains, **options})
    return frame[frame["reader"] == "all"].set_index("component")


@pytest.mark.parametrize("seed", range(3))
def test_pure_noise_explains_nothing(seed):
    """An in-sample R^2 of token identity, about types / tokens too high, passed off as a finding."""
    found = total(planted(seed, static=0), permutations=60, seed=seed)
    parts = found.drop("context")
    assert (parts["r2"].abs() < 0.01).all()
    assert found.loc["token", "in_sample"] > 0.03
    # Half a percent is what shrinking costs; the bound is one of 95 %.
    assert found.loc["token", "r2"] <= found.loc["token", "null_high"] + 0.002
    assert found.loc["context", "r2"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("part", ["position", "token", "domain", "document"])
def test_a_planted_effect_lands_in_its_own_part(part):
    """Labels of one part fitted with another's, or a part fitted out of order."""
    found = total(planted(1, static=0, **{part: 1.0}))
    assert found["r2"].drop("context").idxmax() == part
    # A part is a draw of few effects for position and domain; what it leaves is the context's own share.
    assert found.loc[part, "r2"] == pytest.approx(1 - found.loc["context", "r2"], abs=0.04)
    assert 0.2 < found.loc[part, "r2"] < 0.8
    assert found.loc[part, "low"] > found.loc[part, "null_high"]
    others = found["r2"].drop([part, "context"])
    assert (others.abs() < 0.04).all()


def test_planted_shares_come_out_as_planted():
    """A denominator other than the variance around the reader's mean, or shrinkage that eats the effect."""
    trace = planted(2, static=1, token=1, context=0.5)
    weight = trace["weight"]
    centre = weight.mean(("token", "source"))
    static = float(((weight.mean("token") - centre) ** 2).sum() * len(weight) / ((weight - centre) ** 2).sum())
    found = total(trace)["r2"]
    assert found["static"] == pytest.approx(static, abs=0.01)
    # A mean of 16 tokens misses a sixteenth of the context's variance.
    assert found["token"] == pytest.approx((1 - static) * (0.8 - 0.2 / 16), abs=0.03)
    assert found["context"] == pytest.approx((1 - static) * (0.2 + 0.2 / 16), abs=0.03)


def test_context_stays_context():
    """A predictor that sees the token it predicts would explain noise."""
    found = total(planted(3, static=1, context=1))
    assert found.loc[["position", "token", "domain", "document"], "r2"].abs().max() < 0.01
    assert found.loc["context", "r2"] == pytest.approx(1 - found.loc["static", "r2"], abs=0.02)


def test_a_type_of_one_document_predicts_nothing():
    """Leakage: with document effects and no shared vocabulary, types fitted on the same document explain them."""
    found = total(planted(4, static=0, document=1, own=True), domains=None)
    assert abs(found.loc["token", "r2"]) < 0.02
    assert found.loc["token", "in_sample"] > 0.4
    assert found.loc["document", "r2"] > 0.3
    assert "domain" not in found.index


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100))
def test_parts_sum_to_one_and_ignore_scale_and_order(seed, scale):
    """A part with units, or one that depends on how tokens are stored."""
    trace = planted(seed, position=0.5, token=0.5)
    options = {"permutations": 2, "resamples": 20}
    found = total(trace, **options)
    assert found["r2"].sum() == pytest.approx(1)
    assert found["in_sample"].sum() == pytest.approx(1)
    order = np.random.default_rng(seed).permutation(trace.sizes["token"])
    np.testing.assert_allclose(total(trace.isel(token=order), **options)["r2"], found["r2"], atol=1e-9)
    scaled = trace.assign(weight=trace["weight"] * scale)
    np.testing.assert_allclose(total(scaled, **options)["r2"], found["r2"], atol=1e-9)


def test_unknown_weights_leave_their_tokens_out():
    """A NaN that spreads over a reader, or is taken for 0."""
    trace = planted(5, token=1)
    weight = trace["weight"].copy()
    weight[7, 4, 2], weight[:, 3, 1] = np.nan, np.nan
    frame = variance_of_routing(trace.assign(weight=weight), permutations=2).set_index(["reader", "component"])
    tokens = trace.sizes["token"]
    assert frame.loc[("final", "static"), "tokens"] == tokens - 1
    assert frame.loc[("all", "static"), "tokens"] == tokens
    without = trace.isel(token=np.arange(tokens) != 7)
    expected = variance_of_routing(without, permutations=2).set_index(["reader", "component"])
    np.testing.assert_allclose(frame.loc["final", "r2"], expected.loc["final", "r2"])
    few = trace.isel(token=slice(0, 3 * LENGTH))
    few = few.assign(weight=few["weight"].where((few["sample"] != 1) | (few["reader"] != "final")))
    few = variance_of_routing(few, permutations=2).set_index(["reader", "component"])
    assert few.loc["final", "r2"].sum() == pytest.approx(1)
    assert few.loc[("final", "static"), ["tokens", "documents"]].tolist() == [2 * LENGTH, 2]
    assert frame["share"].drop("all", level=0).groupby("component").sum().to_numpy() == pytest.approx(1)


def rounded(trace, seed=0):
    """Its weights with a rounding of float64 of their own at every token."""
    noise = np.random.default_rng(seed).uniform(-1, 1, trace["weight"].shape) * np.finfo(float).eps
    return trace.assign(weight=trace["weight"] * (1 + noise))


EQUAL = trace_of(np.ones((40, 3, 2)), samples=np.repeat([0, 1], 20))


@pytest.mark.parametrize("trace", [planted(0, context=0), EQUAL, planted(0, context=0).isel(token=slice(0, LENGTH))])
@pytest.mark.parametrize("change", [lambda trace: trace, rounded, lambda trace: trace.astype(np.float32)])
def test_fixed_weights_are_static_whatever_they_are(trace, change):
    """Rounding divided by rounding: a 1e-16 for uneven weights, NaN for equal ones, an interval for neither."""
    frame = variance_of_routing(change(trace), permutations=2, resamples=20)
    static, rest = (part for _, part in frame.groupby(frame["component"] != "static"))
    assert frame["fixed"].all()
    assert (static[["r2", "in_sample"]] == 1).all(axis=None)
    assert (rest[["r2", "in_sample"]] == 0).all(axis=None)
    assert (rest.loc[rest["component"] != "context", ["null_mean", "null_high"]] == 0).all(axis=None)
    assert static[["null_mean", "null_high"]].isna().all(axis=None)
    several = len(np.unique(trace["sample"])) > 1
    assert static[["low", "high"]].eq(1).all(axis=None) == rest[["low", "high"]].eq(0).all(axis=None) == several
    assert (staticness(change(trace))["staticness"] == 1).all()


def test_one_fixed_reader_does_not_make_the_rest_fixed():
    """A flag of the whole taken from one reader: the first, whose one weight is given."""
    trace = planted(0, token=1)
    trace = trace.assign(weight=trace["weight"].where(trace["reader"] != "0.attn", 1.0))
    frame = variance_of_routing(trace, permutations=2, resamples=20).set_index(["reader", "component"])
    assert frame["fixed"].groupby("reader", sort=False).first().tolist() == [True, False, False, False, False, False]
    assert frame.loc[("0.attn", "static"), ["r2", "share"]].tolist() == [1, pytest.approx(0, abs=1e-20)]
    assert frame.loc[("all", "token"), "r2"] > 0.1


def test_one_document_has_no_held_out_value():
    """A predictor scored on what it was fitted on."""
    frame = variance_of_routing(planted(0).isel(token=slice(0, LENGTH)), permutations=2)
    assert frame[["r2", "low", "high"]].isna().all(axis=None)
    assert frame["in_sample"].notna().any()
    one = staticness(planted(0).isel(token=slice(0, LENGTH)))
    assert one[["staticness", "low", "high"]].isna().all(axis=None)


def test_staticness_of_known_variances():
    """Variance around zero, around the grand mean or around the wrong mean."""
    generator = np.random.default_rng(0)
    profile = np.array([3.0, 1.0, 2.0])
    noise = 0.5 * generator.standard_normal((6000, 3, 3))
    trace = trace_of(np.ones((6000, 3, 2)), profile + noise, samples=np.repeat(np.arange(60), 100))
    # Readers see 1, 2 and 3 sources: sums of squares around each reader's own mean, and around zero.
    static, zero = (0 + 2 + 2) / 6, (9 + 10 + 14) / 6
    around = staticness(trace).iloc[0]
    assert around["staticness"] == pytest.approx(static / (static + 0.25), abs=0.01)
    assert around["low"] < around["staticness"] < around["high"]
    assert staticness(trace, around="zero").iloc[0]["staticness"] == pytest.approx(zero / (zero + 0.25), abs=0.01)
    part = variance_of_routing(trace, permutations=2).set_index(["reader", "component"])
    assert part.loc[("all", "static"), "r2"] == pytest.approx(around["staticness"], abs=0.001)


def test_what_the_scheme_guarantees_is_not_a_finding():
    """Staticness 1 of a plain residual, or of an untrained router, stated as something learned."""
    fixed = planted(0, context=0)
    assert staticness(fixed).iloc[0][["staticness", "fixed", "guaranteed"]].tolist() == [1, True, "yes"]
    fixed.attrs["scheme"] = "hyper_connections"
    assert staticness(fixed).iloc[0][["staticness", "fixed", "guaranteed"]].tolist() == [1, True, "unknown"]
    assert staticness(planted(0)).iloc[0]["guaranteed"] == "no"


def test_natives_of_streams_are_measured_too():
    """Sites or streams mixed up with tokens."""
    generator = np.random.default_rng(0)
    pre = np.array([1.0, 0, 0, 0]) + np.zeros((80, 5, 4))
    mix = generator.standard_normal((80, 5, 4, 4))
    natives = {
        "native_pre": (("token", "site", "stream"), pre),
        "native_mix": (("token", "site", "stream", "stream2"), mix),
    }
    trace = trace_of(np.ones((80, 5, 2)), samples=np.repeat(np.arange(4), 20), natives=natives)
    found = staticness(trace).set_index("variable")["staticness"]
    assert found.index.tolist() == ["weight", "native_pre", "native_mix"]
    assert found["native_pre"] == 1
    assert abs(found["native_mix"]) < 0.1
    assert "site" in variance_of_routing(trace, of="native_mix", permutations=2)


@pytest.mark.parametrize("name", ["hyper_connections", "attnres", "dca", "ddl", "post_ln", "denseformer"])
def test_every_kind_of_map_has_its_parts(name):
    """Scalar, per-channel and conditional maps, q/k/v readers, documents of one token."""
    model = build(NAMED[name], "random")
    trace = ri.capture(model, prompts_for(model, (9, 4, 17, 1, 12)))
    found = variance_of_routing(trace, permutations=2).set_index(["reader", "component"])
    assert found.loc["all", "r2"].sum() == pytest.approx(1)
    assert staticness(trace).iloc[0]["fixed"] == (name == "denseformer")


def test_wrong_options_are_named():
    """A silent default, or a domain missing for some documents."""
    trace = planted(0)
    with pytest.raises(OptionError, match="folds is 1"):
        variance_of_routing(trace, folds=1)
    with pytest.raises(OptionError, match="no label for 29 of 30 documents, such as 1"):
        variance_of_routing(trace, domains={0: "a"})
    with pytest.raises(OptionError, match="choose reader or zero"):
        staticness(trace, around="mean")
    with pytest.raises(OptionError, match="drop_first is 99"):
        staticness(trace, drop_first=99)
    with pytest.raises(TraceError, match="native_alpha"):
        variance_of_routing(trace, of="native_alpha")


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_shuffles_stay_in_their_groups(seed):
    """A null that also breaks what it must keep."""
    labels = label_tokens(planted(seed))
    for order in shuffles(labels.places(), 2, seed):
        assert sorted(order) == list(range(order.size))
        np.testing.assert_array_equal(labels.document[order], labels.document)
        np.testing.assert_array_equal(labels.place[order], labels.place)
