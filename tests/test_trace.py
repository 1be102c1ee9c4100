"""The trace convention and its store. Each test names the bug it would catch."""

import errno
import json
import pickle
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from resinspect import trace as rt
from resinspect.anatomy import decoder_anatomy
from resinspect.errors import TraceError
from resinspect.trace import manifest, shard, writer

# A warning from Zarr or xarray would reach every user on every save.
pytestmark = pytest.mark.filterwarnings("error")

ATTRS = {
    "model": "tiny",
    "scheme": "pre_ln",
    "method": "replay",
    "dtype": "float32",
    "write_definition": "sublayer output",
    "source_definition": "embedding and writes",
    "versions": {"torch": "2.6"},
    "hash": "0" * 64,
    "tolerance": 4.0,
}


def arrays(lengths=(3, 4), layers=2, seed=0, hidden=8):
    rng = np.random.default_rng(seed)
    anatomy = decoder_anatomy(layers)
    count, total = len(anatomy.sources), sum(lengths)
    prefix = np.array([reader.prefix for reader in anatomy.readers])
    weight = rng.normal(size=(total, count, count)).astype(np.float32)
    weight[:, np.arange(count) >= prefix[:, None]] = np.nan
    writes = rng.normal(size=(total, count, hidden)).astype(np.float32)
    loss = rng.random(total)
    loss[np.cumsum(lengths) - 1] = np.nan
    return {
        "weight": weight,
        "gram": writes @ writes.swapaxes(1, 2),
        "cross": weight.copy(),
        "source_norm": np.linalg.norm(writes, axis=-1),
        "reader_norm": rng.random((total, count)).astype(np.float32),
        "fidelity": np.full((total, count), 1e-8),
        "kappa": np.ones((total, count)),
        "loss": loss,
        "native_score": (("token", "site"), rng.random((total, 3)).astype(np.float16)),
        "native_index": (("token",), np.arange(total)),
    }


def make(lengths=(3, 4), layers=2, seed=0, text=None, attrs=None, **changes):
    anatomy, total = decoder_anatomy(layers), sum(lengths)
    return rt.build_trace(
        {**arrays(lengths, layers, seed), **changes},
        readers=anatomy.readers,
        sources=anatomy.sources,
        tokens={
            "sample": np.repeat(np.arange(len(lengths)), lengths),
            "position": np.concatenate([np.arange(n) for n in lengths]),
            "token_id": np.arange(total),
            "text": text or [f" w{i}" for i in range(total)],
        },
        coords={"site": ["a", "bé", "c"]},
        attrs={**ATTRS, **(attrs or {})},
    )


# --- convention -------------------------------------------------------------------------------------------------


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


def recast(trace, name, dtype):
    return trace.assign({name: trace[name].astype(dtype)})


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
    with pytest.raises(TraceError, match="no traces"):
        rt.concat([])


# --- store: round trip ------------------------------------------------------------------------------------------

tokens = st.one_of(
    st.text(max_size=12), st.sampled_from(["<s>", "$x$", "\n", "", "a\x00", "שלום", "🙂", "👩‍👩‍👧", "\u202e"])
)


@settings(max_examples=8, deadline=None)
@given(text=st.lists(tokens, min_size=30, max_size=30))
def test_round_trip_is_identical(tmp_path_factory, text):
    # Catches lost text (empty tokens, NULs, right-to-left), changed dtypes, attributes and NaNs.
    trace, path = make((10, 20), text=text), tmp_path_factory.mktemp("round") / "t"
    rt.save_trace(trace, path)
    opened = rt.open_trace(path)
    assert opened.identical(trace)
    assert opened["text"].values.tolist() == text
    for name, variable in trace.variables.items():
        assert opened[name].dtype == variable.dtype, name
        if variable.dtype.kind != "O":
            assert opened[name].values.tobytes() == variable.values.tobytes(), name
    assert list(opened.attrs.items()) == list(trace.attrs.items())


def test_signed_zeros_and_zero_chunks_survive(tmp_path):
    # Catches Zarr leaving out chunks that equal the fill value, which turns -0.0 into 0.0.
    trace = make(fidelity=np.full((7, 5), -0.0))
    rt.save_trace(trace, tmp_path / "t")
    assert np.signbit(rt.open_trace(tmp_path / "t")["fidelity"].values).all()


def test_appended_batches_equal_concat(tmp_path):
    # Catches shards joined in the wrong order, and sample numbers that differ between memory and disk.
    parts = [make((2, 1), seed=seed) for seed in range(3)]
    with rt.TraceWriter(tmp_path / "t") as out:
        for part in parts:
            out.append(part)
    assert rt.open_trace(tmp_path / "t").identical(rt.concat(parts))


def test_large_traces_are_cut_between_prompts(tmp_path, monkeypatch):
    # Catches a shard that begins inside a prompt, and a save that needs the whole trace in memory.
    monkeypatch.setattr(writer, "_SAVE_TOKENS", 4)
    trace = make((3, 2, 4, 1))
    rt.save_trace(trace, tmp_path / "t")
    assert list(manifest.read_manifest(tmp_path / "t").shards.values()) == [5, 4, 1]
    rt.save_trace(rt.open_trace(tmp_path / "t"), tmp_path / "t")
    assert rt.open_trace(tmp_path / "t").identical(trace)


def tree(path):
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_same_trace_same_bytes(tmp_path):
    # Catches timestamps or random names, which make results impossible to compare by hash.
    for name in ("a", "b"):
        rt.save_trace(make(), tmp_path / name)
        rt.export_zip(tmp_path / name, tmp_path / f"{name}.zip")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_zip_opens_like_the_folder(tmp_path):
    # Catches a shard left out of the zip, and lazy reading that only works on folders.
    with rt.TraceWriter(tmp_path / "t") as out:
        for seed in range(2):
            out.append(make(seed=seed))
    file = rt.export_zip(tmp_path / "t", tmp_path / "t.zip")
    expected = rt.open_trace(tmp_path / "t").load()
    shutil.rmtree(tmp_path / "t")
    assert rt.open_trace(file).identical(expected)
    with pytest.raises(TraceError, match="is a file"):
        rt.export_zip(file, tmp_path / "u.zip")


# --- store: lazy reading ----------------------------------------------------------------------------------------

keys = st.one_of(
    st.integers(-5, 4),
    # xarray itself fails on an empty slice with a negative step.
    st.slices(5).filter(lambda k: (k.step or 1) > 0 or range(5)[k]),
    st.lists(st.integers(0, 4), max_size=6),
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A trace of three shards with 5 tokens, 5 readers and 5 sources: opened, and in memory."""
    path = tmp_path_factory.mktemp("stored") / "t"
    parts = [make((2,), seed=0), make((1,), seed=1), make((2,), seed=2)]
    with rt.TraceWriter(path) as out:
        for part in parts:
            out.append(part)
    return rt.open_trace(path), rt.concat(parts)


@settings(max_examples=60, deadline=None)
@given(token=keys, reader=keys, source=keys)
def test_lazy_indexing_equals_numpy(stored, token, reader, source):
    # Catches off-by-one at shard borders, negative steps, repeated and unordered indices, dropped dims.
    opened, memory = stored
    index = {"token": token, "reader": reader, "source": source}
    found, expected = opened["weight"].isel(index), memory["weight"].isel(index)
    assert found.dims == expected.dims
    np.testing.assert_array_equal(found.values, expected.values)


def test_opening_reads_no_variable(tmp_path):
    # Catches an open (or a look at a few tokens) that loads the trace: a survey would not fit in memory.
    with rt.TraceWriter(tmp_path / "t") as out:
        for seed in range(4):
            out.append(make((300,), layers=30, seed=seed, cross=np.full((300, 61, 61), np.nan)))
    whole = 4 * 300 * 61 * 61 * 4
    tracemalloc.start()
    trace = rt.open_trace(tmp_path / "t")
    assert tracemalloc.get_traced_memory()[1] < whole / 8
    assert rt.select(trace, samples=2, tokens=[5])["gram"].values.shape == (1, 61, 61)
    assert tracemalloc.get_traced_memory()[1] < whole / 1.5
    tracemalloc.stop()


def test_lazy_traces_pickle(stored):
    # Catches a lazy trace that cannot be sent to a worker process.
    opened, memory = stored
    assert pickle.loads(pickle.dumps(opened)).identical(memory)


def first(path, pattern):
    return sorted(path.glob(pattern))[0]


@pytest.mark.parametrize("pattern", ["*.zarr/weight/c/0/0/0", "*.zarr/weight/zarr.json", "*.zarr/zarr.json"])
@pytest.mark.parametrize("damage", ["delete", "flip", "cut"])
def test_damage_is_reported_not_read(tmp_path, pattern, damage):
    # Catches Zarr's silent fill value for a lost chunk: 0 would mean "not read". Also flipped bits.
    rt.save_trace(make(), tmp_path / "t")
    file = first(tmp_path / "t", pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    if damage == "delete":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    with pytest.raises(TraceError, match=r"shard shard-000-00000.zarr of .* cannot be read"):
        rt.open_trace(tmp_path / "t")["weight"].load()


def test_reading_after_an_overwrite_is_refused(tmp_path):
    # Catches old and new values mixed in one dataset.
    rt.save_trace(make(seed=0), tmp_path / "t")
    old = rt.open_trace(tmp_path / "t")
    old["weight"].shape, old["kappa"].load()
    rt.save_trace(make(seed=1), tmp_path / "t")
    with pytest.raises(TraceError, match=r"cannot be read|overwritten"):
        old["weight"].load()


# --- store: refusals --------------------------------------------------------------------------------------------


def test_open_says_what_is_wrong(tmp_path):
    # Catches tracebacks from pathlib, json and zipfile for a mistyped path.
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name, message in {
        "none": "there is no such file or folder",
        "file": "is a file; a trace is a folder",
        "folder": "has no manifest.json",
    }.items():
        with pytest.raises(TraceError, match=message):
            rt.open_trace(tmp_path / name)


GOOD = "shard-000-00000.zarr"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("\xff\x00", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "names no convention"),
        ({"convention": "resinspect-trace/9"}, "this version reads"),
        ({"complete": 1}, "'complete'"),
        ({"generation": -1}, "'generation'"),
        ({"shards": {}}, "at least one shard"),
        ({"shards": [GOOD]}, "at least one shard"),
        ({"shards": {"../other": 7}}, "names the shard '../other'"),
        ({"shards": {"/etc": 7}}, "names the shard"),
        ({"shards": {GOOD + "/../..": 7}}, "names the shard"),
        ({"shards": {GOOD + "\n": 7}}, "names the shard"),
        ({"shards": {GOOD: -7}}, "tokens"),
        ({"shards": {GOOD: True}}, "tokens"),
        ({"shards": {GOOD: 10**30}}, "tokens"),
        ({"shards": {GOOD: 8}}, "the manifest says 8"),
        ({"shards": {GOOD: 7, "shard-000-00001.zarr": 7}}, "lacks shard-000-00001.zarr"),
    ],
)
def test_manifests_are_not_trusted(tmp_path, content, message):
    # Catches a downloaded trace that reads outside its folder, or that takes the reader down.
    path = tmp_path / "t"
    rt.save_trace(make(), path)
    if isinstance(content, dict):
        content = json.dumps(json.loads((path / "manifest.json").read_text()) | content)
    (path / "manifest.json").write_text(content)
    with pytest.raises(TraceError, match=message):
        rt.open_trace(path)


def test_layouts_are_not_trusted(tmp_path):
    # Catches a shard whose layout names arrays outside it, and a raw KeyError for one without layout.
    path = tmp_path / "t"
    rt.save_trace(make(), path)
    file = path / GOOD / "zarr.json"
    good = json.loads(file.read_text())
    for layout in ({"coordinates": ["../../x"], "variables": [], "names": {}, "token_text": []}, {}, [], None):
        good["attributes"]["layout"] = layout
        file.write_text(json.dumps(good))
        with pytest.raises(TraceError, match="cannot be read"):
            rt.open_trace(path)


def test_linked_shards_are_refused(tmp_path):
    # Catches a link that leads out of the folder, and a writer that deletes what it points to.
    rt.save_trace(make(), tmp_path / "real")
    rt.save_trace(make(), tmp_path / "t")
    shutil.rmtree(tmp_path / "t" / GOOD)
    (tmp_path / "t" / GOOD).symlink_to(tmp_path / "real" / GOOD)
    with pytest.raises(TraceError, match=f"lacks {GOOD}"):
        rt.open_trace(tmp_path / "t")
    rt.save_trace(make(seed=1), tmp_path / "t")
    assert rt.open_trace(tmp_path / "real").identical(make())


def test_bad_zips_are_refused(tmp_path):
    # Catches zipfile errors reaching the user.
    rt.save_trace(make(), tmp_path / "t")
    file = rt.export_zip(tmp_path / "t", tmp_path / "t.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("../evil", "x")
    with zipfile.ZipFile(tmp_path / "part.zip", "w") as archive:
        archive.writestr("manifest.json", (tmp_path / "t" / "manifest.json").read_text())
    file.write_bytes(file.read_bytes()[:-30])
    for name, message in {"t.zip": "is a file", "other.zip": "has no manifest", "part.zip": f"lacks {GOOD}"}.items():
        with pytest.raises(TraceError, match=message):
            rt.open_trace(tmp_path / name)
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "shard-x.zarr"])
def test_other_folders_are_left_alone(tmp_path, name):
    # Catches a save that deletes or litters a folder the user named by mistake.
    (tmp_path / name).write_text('{"name": "app"}')
    with pytest.raises(TraceError, match=r"other files|names no convention"):
        rt.save_trace(make(), tmp_path)
    assert tree(tmp_path) == {name: b'{"name": "app"}'}
    with pytest.raises(TraceError, match="is a file"):
        rt.save_trace(make(), tmp_path / name)


def test_files_of_the_user_survive_an_overwrite(tmp_path):
    # Catches an overwrite that replaces the whole folder.
    rt.save_trace(make(seed=0), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    rt.save_trace(make(seed=1), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert rt.open_trace(tmp_path).identical(make(seed=1))
    assert len(list(tmp_path.glob("*.zarr"))) == 1


def test_two_writers_do_not_meet(tmp_path):
    # Catches a second writer that deletes the shards of the first as orphans.
    with rt.TraceWriter(tmp_path / "t") as out:
        out.append(make())
        with pytest.raises(TraceError, match="another writer"):
            rt.save_trace(make(), tmp_path / "t")
        out.append(make())
    assert rt.open_trace(tmp_path / "t").sizes["token"] == 14
    rt.save_trace(make(), tmp_path / "t")


def test_batches_have_to_fit(tmp_path):
    # Catches a trace whose shards have different readers, and a writer used without `with`.
    with rt.TraceWriter(tmp_path / "t") as out:
        out.append(make())
        with pytest.raises(TraceError, match="batch 2 cannot be joined to the batches before it"):
            out.append(make(layers=1))
        with pytest.raises(TraceError, match="not a valid trace"):
            out.append(make().drop_vars("weight"))
    assert rt.open_trace(tmp_path / "t").identical(make())
    with pytest.raises(TraceError, match="outside `with"):
        out.append(make())


# --- store: accidents -------------------------------------------------------------------------------------------


def append_then_fail(path, trace, error=ZeroDivisionError):
    with rt.TraceWriter(path) as out:
        out.append(trace)
        raise error


def test_exceptions_leave_no_half_trace(tmp_path):
    # Catches a folder that opens as complete, or an old trace lost, when the capture fails midway.
    path = tmp_path / "t"
    with pytest.raises(ZeroDivisionError), rt.TraceWriter(path):
        raise ZeroDivisionError
    assert not path.exists()
    with pytest.raises(ZeroDivisionError):
        append_then_fail(path, make(seed=0))
    with pytest.warns(UserWarning, match="is incomplete: its writer did not finish after batch 1"):
        assert rt.open_trace(path).identical(make(seed=0))
    rt.save_trace(make(seed=1), path)
    before = tree(path)
    with pytest.raises(ZeroDivisionError):
        append_then_fail(path, make(seed=2))
    assert tree(path) == before


def test_an_empty_writer_is_an_error(tmp_path):
    # Catches an old trace replaced by nothing.
    with pytest.raises(TraceError, match="no batch was appended"), rt.TraceWriter(tmp_path / "t"):
        pass
    assert not (tmp_path / "t").exists()
    rt.save_trace(make(), tmp_path / "t")
    with pytest.raises(TraceError, match="no batch was appended"), rt.TraceWriter(tmp_path / "t"):
        pass
    assert rt.open_trace(tmp_path / "t").identical(make())


@pytest.mark.parametrize("place", ["shard", "manifest"])
def test_a_full_disk_keeps_what_was_there(tmp_path, monkeypatch, place):
    # Catches a raw OSError, leftovers that fill the disk further, and an old trace lost to a failed one.
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    path, owner, name = tmp_path / "t", *((shard, "_write_array") if place == "shard" else (manifest.os, "fsync"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(TraceError, match=r"^disk full while saving .*; nothing was saved$"):
            rt.save_trace(make(), path)
    assert not path.exists()
    rt.save_trace(make(seed=0), path)
    before = tree(path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(TraceError, match=r"^disk full while saving .*; the earlier trace is untouched$"):
            rt.save_trace(make(seed=1), path)
    assert tree(path) == before
    (tmp_path / "new").mkdir()
    with monkeypatch.context() as patch, rt.TraceWriter(tmp_path / "new") as out:
        out.append(make())
        patch.setattr(owner, name, full)
        with pytest.raises(TraceError, match="batches kept from before: 1"):
            out.append(make())
        patch.undo()
        out.append(make(seed=1))
    assert rt.open_trace(tmp_path / "new").identical(rt.concat([make(), make(seed=1)]))
    assert only_named_shards(tmp_path / "new")


CHILD = """
import os, resource, signal, sys
from resinspect import trace as rt
from resinspect.errors import TraceError
from resinspect.trace import shard, writer
assert not {"torch", "transformers", "dask"} & set(sys.modules), "trace must stay light"
path, new, place, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
batch = rt.open_trace(new).load()

def killer(function):
    calls = 0
    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped

if place == "array":
    shard._write_array = killer(shard._write_array)
elif place == "sweep":
    writer.sweep = killer(writer.sweep)
elif place == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
try:
    with rt.TraceWriter(path) as out:
        for _ in range(3):
            out.append(batch)
except TraceError as error:
    print(error)
"""


def run_child(path, new, place, count):
    command = [sys.executable, "-c", CHILD, str(path), str(new), place, str(count)]
    root = Path(__file__).parents[1]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "new"
    rt.save_trace(make(seed=5), path)
    return path


# Arrays in one shard: every numeric variable, and two for the text of the tokens.
PER_SHARD = 10 + 6 + 2


def only_named_shards(path):
    return {p.name for p in path.iterdir()} == {"manifest.json", ".lock", *manifest.read_manifest(path).shards}


def test_kill_while_writing_the_first_batch(tmp_path, batch):
    # Catches half a shard that opens, and leftovers that block the next writer.
    path = tmp_path / "t"
    assert run_child(path, batch, "array", 5).returncode == -signal.SIGKILL
    with pytest.raises(TraceError, match="has no manifest"):
        rt.open_trace(path)
    rt.save_trace(make(), path)
    assert rt.open_trace(path).identical(make())
    assert only_named_shards(path)


def test_kill_while_appending(tmp_path, batch):
    # Catches a store that does not open after a crash, or hides that it is incomplete.
    path = tmp_path / "t"
    assert run_child(path, batch, "array", 2 * PER_SHARD + 5).returncode == -signal.SIGKILL
    with pytest.warns(UserWarning, match="incomplete: its writer did not finish after batch 2"):
        assert rt.open_trace(path).identical(rt.concat([make(seed=5)] * 2))
    rt.save_trace(make(), path)
    assert rt.open_trace(path).identical(make())
    assert only_named_shards(path)


def test_kill_while_overwriting(tmp_path, batch):
    # Catches an old trace that is deleted or replaced before the new one is whole.
    path = tmp_path / "t"
    rt.save_trace(make(seed=0), path)
    assert run_child(path, batch, "array", PER_SHARD + 5).returncode == -signal.SIGKILL
    assert not only_named_shards(path)
    assert rt.open_trace(path).identical(make(seed=0))
    rt.save_trace(make(seed=1), path)
    assert rt.open_trace(path).identical(make(seed=1))
    assert only_named_shards(path)


def test_kill_between_replacing_and_deleting(tmp_path, batch):
    # Catches a new trace that is lost, or an old one that stays on disk for ever.
    path = tmp_path / "t"
    rt.save_trace(make(seed=0), path)
    assert run_child(path, batch, "sweep", 2).returncode == -signal.SIGKILL
    assert rt.open_trace(path).identical(rt.concat([make(seed=5)] * 3))
    assert not only_named_shards(path)
    rt.save_trace(make(seed=1), path)
    assert only_named_shards(path)


def test_a_real_write_limit(tmp_path, batch):
    # Catches an error of the operating system that Zarr wraps, so that "disk full" is never recognised.
    path = tmp_path / "t"
    rt.save_trace(make(seed=0), path)
    before = tree(path)
    result = run_child(path, batch, "limit", 200)
    assert "disk full while saving" in result.stdout, result.stderr
    assert "the earlier trace is untouched" in result.stdout
    assert tree(path) == before


def test_interrupt_after_the_replacement_keeps_the_new_trace(tmp_path, monkeypatch):
    # Catches a withdrawal that trusts its memory: it would delete the shards the manifest on disk names.
    rt.save_trace(make(seed=0), tmp_path / "t")
    publish = manifest.Manifest.publish

    def interrupted(self, path):
        publish(self, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.Manifest, "publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rt.save_trace(make(seed=1), tmp_path / "t")
    assert rt.open_trace(tmp_path / "t").identical(make(seed=1))
    assert only_named_shards(tmp_path / "t")
