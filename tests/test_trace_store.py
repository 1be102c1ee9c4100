"""Saving and opening traces: what comes back, and how much is read. Each test names the bug it would catch."""

import pickle
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_cases import make, tree

from resinspect import trace as rt
from resinspect.errors import TraceError
from resinspect.trace import manifest, writer

# A warning from Zarr or xarray would reach every user on every save.
pytestmark = pytest.mark.filterwarnings("error")

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "t"
    rt.save_trace(make(), path)
    return path


@pytest.mark.parametrize("name", ["weight/c.0.0.0", "weight/zarr.json", "zarr.json", "text_utf8/c.0"])
@pytest.mark.parametrize("damage", ["delete", "flip", "cut"])
def test_damage_is_reported_not_read(saved, name, damage):
    # Catches Zarr's silent fill value for a lost chunk: 0 would mean "not read". Also flipped bits.
    file = saved / "shard-000-00000.zarr" / name
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.unlink()
    if damage != "delete":
        file.write_bytes(whole[:middle] + (bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]) * (damage == "flip"))
    try:
        with pytest.raises(TraceError, match=r"shard shard-000-00000.zarr of .* cannot be read"):
            rt.open_trace(saved)["weight"].load()
    finally:
        file.write_bytes(whole)


def test_reading_after_an_overwrite_is_refused(tmp_path):
    # Catches old and new values mixed in one dataset.
    rt.save_trace(make(seed=0), tmp_path / "t")
    old = rt.open_trace(tmp_path / "t")
    rt.save_trace(make(seed=1), tmp_path / "t")
    with pytest.raises(TraceError, match="was overwritten after this trace was opened"):
        old["weight"].load()
