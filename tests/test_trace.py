"""The trace convention: building, checking, judging, selecting, joining. Each test names the bug it would catch."""

import json

import numpy as np
import pytest
import xarray as xr
from trace_cases import ATTRS, make, recast

from resinspect import trace as rt
from resinspect.errors import TraceError

pytestmark = pytest.mark.filterwarnings("error")


def test_build_labels_every_variable_from_the_table():
    # Catches a figure without axis title: a variable of the table that lost its name or unit.
    trace = make()
    assert rt.check_trace(trace) == []
    for name in trace.data_vars:
        if name in rt.VARIABLES:
            assert trace[name].attrs == {"long_name": rt.VARIABLES[name].long_name, "units": rt.VARIABLES[name].units}
    assert json.loads(trace.attrs["versions"]) == {"torch": "2.6"}
    assert trace.attrs["convention"] == rt.CONVENTION


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"wieght": np.zeros((7, 5, 5))}, "'wieght' is not in the table"),
        ({"weight": np.zeros((7, 5))}, r"'weight' has shape \(7, 5\)"),
        ({"loss": np.zeros(6)}, "do not fit together"),
    ],
)
def test_build_says_what_does_not_fit(variables, message):
    # Catches raw numpy and xarray errors for a capture that mixes up its arrays.
    with pytest.raises(TraceError, match=message):
        make(**variables)


def test_build_refuses_unknown_token_columns():
    # Catches a KeyError for a misspelt coordinate.
    with pytest.raises(TraceError, match="'samples' is not a coordinate of tokens; expected sample"):
        rt.build_trace({}, readers=[], sources=[], tokens={"samples": [0]}, attrs=ATTRS)


def changed(trace, name, index, value):
    values = trace[name].values.copy()
    values[index] = value
    return (
        trace.assign({name: (trace[name].dims, values)})
        if name in trace.data_vars
        else trace.assign_coords({name: (trace[name].dims, values)})
    )


def attr(trace, **attrs):
    return trace.assign_attrs(attrs)


def without_attr(trace, name):
    trace = trace.copy()
    del trace.attrs[name]
    return trace


VIOLATIONS = {
    "missing variable": (lambda t: t.drop_vars("weight"), "variable 'weight' is missing"),
    "unknown variable": (lambda t: t.assign(extra=t["loss"]), "variable 'extra' is unknown"),
    "wrong dims": (lambda t: t.assign(weight=t["weight"].transpose("token", "source", "reader")), "'weight' has dims"),
    "not float": (lambda t: recast(t, "kappa", int), "variable 'kappa' has dtype int64; expected a float"),
    "native without token": (lambda t: t.assign(native_x=("site", np.zeros(3))), "'native_x' has dims ('site',)"),
    "native of text": (lambda t: t.assign(native_x=t["text"]), "variable 'native_x' has dtype object"),
    "missing coordinate": (lambda t: t.drop_vars("sample"), "coordinate 'sample' is missing"),
    "coordinate dims": (lambda t: t.drop_vars("text").assign_coords(text=("site", list("abc"))), "'text' has dims"),
    "coordinate dtype": (lambda t: t.assign_coords(position=t["position"] * 1.0), "'position' has dtype float64"),
    "text not str": (lambda t: changed(t, "text", 1, 7), "coordinate 'text' has dtype object; expected str"),
    "odd coordinate": (lambda t: t.assign_coords(when=np.datetime64("2026-01-01")), "coordinate 'when' has dtype"),
    "missing attribute": (lambda t: without_attr(t, "model"), "attribute 'model' is missing"),
    "attribute type": (lambda t: attr(t, hash=7), "attribute 'hash' is 7; expected a str"),
    "convention": (lambda t: attr(t, convention="resinspect-trace/2"), "attribute 'convention' is"),
    "method": (lambda t: attr(t, method="guess"), "attribute 'method' is 'guess'; expected one of 'replay', 'solve'"),
    "dtype": (lambda t: attr(t, dtype="torch.float32"), "attribute 'dtype' is 'torch.float32'"),
    "tolerance": (lambda t: attr(t, tolerance=0.0), "attribute 'tolerance' is 0.0"),
    "attribute not storable": (lambda t: attr(t, note={"a": object()}), "attribute 'note' is"),
    "beyond prefix": (
        lambda t: changed(t, "weight", (2, 1, 3), 0.0),
        "variable 'weight' is 0 at token 2, reader '0.mlp', source '1.attn', a source beyond that reader's prefix of 2",
    ),
    "cross beyond prefix": (lambda t: changed(t, "cross", (0, 0, 1), 1.0), "variable 'cross' is 1 at token 0"),
    "prefix too large": (lambda t: changed(t, "reader_prefix", 4, 9), "'reader_prefix' goes from 1 to 9"),
    "repeated reader": (
        lambda t: t.assign_coords(reader=["0.attn", *t["reader"].values[:-1]]),
        "reader names '0.attn' are repeated",
    ),
    "repeated source": (lambda t: t.assign_coords(source=["a"] * 5), "source names 'a' are repeated"),
    "source2 length": (lambda t: t.isel(source2=slice(3)), "dim 'source2' has length 3; expected 5"),
    "scattered sample": (lambda t: changed(t, "sample", 5, 0), "the tokens of sample 0 are not next to each other"),
    "position gap": (lambda t: changed(t, "position", 4, 2), "coordinate 'position' is 2 at token 4 (sample 1)"),
    "position start": (lambda t: t.isel(token=slice(1, None)), "coordinate 'position' is 1 at token 0"),
    "negative norm": (lambda t: changed(t, "source_norm", (3, 0), -1.0), "'source_norm' is -1 at token 3, source"),
    "negative fidelity": (
        lambda t: changed(t, "fidelity", (0, 4), -1.0),
        "'fidelity' is -1 at token 0, reader 'final'",
    ),
    "gram not symmetric": (lambda t: changed(t, "gram", (6, 0, 1), 9.0), "'gram' is not symmetric at token 6"),
    "loss at the end": (lambda t: changed(t, "loss", 2, 1.0), "'loss' is 1 at token 2, the last of its sample"),
    "no tokens": (lambda t: t.isel(token=slice(0)), "the trace has no tokens"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_each_violation_is_found(case):
    # Catches a rule that was dropped or never fires, and one that fires on its neighbours.
    breaks, sentence = VIOLATIONS[case]
    found = rt.check_trace(breaks(make()))
    assert any(sentence in line for line in found), found
    assert len(found) == 1, found


def test_all_violations_come_in_one_message():
    # Catches a check that stops at the first violation.
    trace = attr(make().drop_vars(["kappa", "text"]), method="x")
    with pytest.raises(TraceError, match="3 violations") as error:
        rt.require_trace(trace)
    assert all(name in str(error.value) for name in ("'kappa'", "'text'", "'method'"))


def test_checks_see_past_the_first_block():
    # Catches value checks that look only at the first 4096 tokens, or count tokens from the block.
    trace = make((5000,), layers=0)
    assert "at token 4999" in rt.check_trace(changed(trace, "reader_norm", (4999, 0), -1.0))[0]


# --- verdict ----------------------------------------------------------------------------------------------------


def judged(fidelity, kappa=3.0, **attrs):
    """One trace whose reader 1.mlp (4 sources) has the given fidelity per token; the others are perfect."""
    total, values = len(fidelity), np.zeros((len(fidelity), 5))
    values[:, 3] = fidelity
    return make((total,), fidelity=values, kappa=np.full((total, 5), kappa), attrs={"tolerance": 2.0, **attrs})


BOUND = 2.0 * 2.0**-23 * 3.0 * 2.0


@pytest.mark.parametrize(
    ("fidelity", "word"),
    [
        ([BOUND, 0.0], "exact"),
        ([0.0, np.nextafter(BOUND, 1)], "off"),
        ([np.nan, BOUND], "exact"),
        ([np.nan, 1.0], "off"),
        ([np.nan, np.nan], "unknown"),
        ([np.nan, np.inf], "off"),
    ],
)
def test_verdict_in_closed_form(fidelity, word):
    # Catches a wrong factor in c eps kappa sqrt(S), averaging over tokens, and NaN or inf passing as exact.
    trace = judged(fidelity)
    words = rt.verdict(trace)
    assert words.dims == ("reader",)
    assert words.sel(reader="1.mlp").item() == word
    assert set(words.values[[0, 1, 2, 4]]) == {"exact"}
    summary = rt.fidelity_summary(trace)
    assert summary["verdict"] == word
    assert summary["off"] == (["1.mlp"] if word == "off" else [])


@pytest.mark.parametrize("kappa", [np.nan, np.inf])
def test_unknown_conditioning_certifies_nothing(kappa):
    # Catches an infinite kappa that excuses any error.
    assert "off" in rt.verdict(judged([1e-3], kappa=kappa)).values


def test_verdict_follows_the_compute_dtype():
    # Catches eps taken from the dtype of the stored array instead of the model's.
    assert rt.fidelity_summary(judged([1e-3]))["verdict"] == "off"
    assert rt.fidelity_summary(judged([1e-3], dtype="bfloat16"))["verdict"] == "exact"
    wide = {"dtype": "bfloat16", "kappa": 30.0}
    words = [rt.fidelity_summary(judged([value], **wide))["verdict"] for value in (0.02, 0.021, 0.93, 0.94)]
    assert words == ["exact", "unknown", "unknown", "off"], "2 * 2^-7 * 30 * 2 = 0.9375"
    numpy_eps = {name: np.finfo(name).eps for name in ("float64", "float32", "float16")}
    assert {name: rt.EPS[name] for name in numpy_eps} == numpy_eps


def test_describe_is_one_line():
    # Catches a caption that hides an "off" map or breaks the line.
    assert rt.describe(make()) == (
        "tokens 7 · readers 5 · sources 5 · method replay · fidelity worst 1.0e-08, median 1.0e-08 · exact"
    )
    assert rt.describe(make(fidelity=np.full((7, 5), 0.5))).endswith(
        "fidelity worst 5.0e-01, median 5.0e-01 · off (0.attn, 0.mlp, 1.attn and 2 more)"
    )
    assert rt.describe(make(fidelity=np.full((7, 5), np.nan))).endswith("worst nan, median nan · unknown")


# --- select and concat ------------------------------------------------------------------------------------------


def test_select_keeps_dims_and_values():
    # Catches a dropped dim, a gram cut along one side only, and readers reordered against their labels.
    trace = make((3, 4, 2))
    part = rt.select(trace, samples=[2, 0], readers=["final", "0.mlp"], sources=["embed", "0.mlp", "1.mlp"])
    assert part["sample"].values.tolist() == [0, 0, 0, 2, 2]
    assert part["reader"].values.tolist() == ["0.mlp", "final"]
    picked = [0, 2, 4]
    np.testing.assert_array_equal(part["gram"], trace["gram"].values[[0, 1, 2, 7, 8]][:, picked][:, :, picked])
    np.testing.assert_array_equal(part["weight"], trace["weight"].values[[0, 1, 2, 7, 8]][:, [1, 4]][:, :, picked])
    assert rt.check_trace(part) == []
    assert rt.select(trace, readers="final", tokens=-1).sizes["token"] == 1
    assert rt.select(trace, tokens=slice(2, 4))["position"].values.tolist() == [2, 0]


def test_select_sources_does_not_change_the_verdict():
    # Catches sqrt(S) counted over the sources that happen to be left.
    trace = judged([BOUND])
    part = rt.select(rt.select(trace, sources=["embed", "1.attn"]), sources=["1.attn"])
    assert part["reader_prefix"].values.tolist() == [0, 0, 0, 1, 1]
    xr.testing.assert_equal(rt.verdict(part), rt.verdict(trace))


@pytest.mark.parametrize(
    "what", [{"samples": 9}, {"tokens": [99]}, {"readers": "nope"}, {"sources": ["embed", "nope"]}]
)
def test_select_refuses_what_is_not_there(what):
    # Catches a typo in a name that silently gives an empty map.
    with pytest.raises(TraceError, match=r"nope|9"):
        rt.select(make(), **what)


def test_concat_keeps_samples_apart():
    # Catches two prompts merged into one because both were number 0, and numbers changed without need.
    joined = rt.concat([make((2, 1)), make((3,)), make((2,)).assign_coords(sample=("token", [7, 7]))])
    assert joined["sample"].values.tolist() == [0, 0, 1, 2, 2, 2, 7, 7]
    assert rt.check_trace(joined) == []
    assert joined.attrs == make().attrs
    assert joined["weight"].attrs == make()["weight"].attrs


def test_concat_names_every_difference():
    # Catches joining two models, or float16 with float32, without a word.
    other = recast(attr(make(layers=1), model="other"), "gram", np.float16).drop_vars("loss")
    with pytest.raises(TraceError, match="trace 2 cannot be joined to trace 1") as error:
        rt.concat([make(), other])
    for piece in ("'other' against 'tiny'", "'reader'", "'source'", "'gram'", "'loss' (only in the first)"):
        assert piece in str(error.value)
    with pytest.raises(TraceError, match="'native_index'"):
        rt.concat([make(), recast(make(), "native_index", np.int32)])
    with pytest.raises(TraceError, match="no traces"):
        rt.concat([])


def test_what_scalars_lose_is_said():
    """A map of best scalars called exact without a word about what they leave out."""
    trace = make()
    assert rt.discarded_share(trace) is None
    assert "lost" not in rt.describe(trace)
    norm = np.abs(np.nan_to_num(trace["weight"].values)) + 1.0
    absent = np.isnan(trace["weight"].values)
    values = {"contribution_norm": norm, "discarded": np.full_like(norm, 0.25), "contribution": 0 * norm}
    lossy = make(**{name: np.where(absent, np.nan, value) for name, value in values.items()})
    assert rt.discarded_share(lossy) == pytest.approx((0.25, 0.25))
    assert "as the scalars shown, 25.0% is lost (median, at most 25.0%)" in rt.describe(lossy)
