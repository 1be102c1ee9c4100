"""Crashes, full disks, second writers and hostile files. Each test names the bug it would catch."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from trace_cases import make, only_named_shards, recast, tree

from resinspect import trace as rt
from resinspect.errors import TraceError
from resinspect.trace import manifest, shard

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "new"
    rt.save_trace(make(seed=5), path)
    return path


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
def test_manifests_are_not_trusted(batch, content, message):
    # Catches a downloaded trace that reads outside its folder, or that takes the reader down.
    file = batch / "manifest.json"
    good = file.read_text()
    file.write_text(json.dumps(json.loads(good) | content) if isinstance(content, dict) else content)
    try:
        with pytest.raises(TraceError, match=message):
            rt.open_trace(batch)
    finally:
        file.write_text(good)


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


def test_shards_of_another_trace_are_refused(tmp_path):
    # Catches numpy broadcasting or rounding a foreign shard into place.
    rt.save_trace(make(), tmp_path / "t")
    rt.save_trace(recast(make(), "weight", np.float64), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / GOOD, tmp_path / "t" / "shard-000-00001.zarr")
    both = manifest.Manifest(True, 0, {GOOD: 7, "shard-000-00001.zarr": 7})
    both.publish(tmp_path / "t")
    with pytest.raises(TraceError, match="differ in 'weight'"):
        rt.open_trace(tmp_path / "t")["weight"].load()


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


# Arrays in one shard: every numeric variable, and two for the text of the tokens.
PER_SHARD = 10 + 6 + 2


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
