"""Save traces so that a crash, a full disk or a second writer never costs a finished one."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import xarray as xr

from resinspect.errors import TraceError
from resinspect.trace.check import require_trace
from resinspect.trace.combine import last_sample, renumber, require_alike
from resinspect.trace.manifest import MANIFEST, SHARD_NAME, Manifest, read_manifest, sync
from resinspect.trace.shard import write_shard

_LOCK = ".lock"
_WRITING, _DELETED = ".writing-", ".deleted-"
_OURS = re.compile(
    rf"({re.escape(_WRITING)}|{re.escape(_DELETED)})?{SHARD_NAME.pattern}|{re.escape(MANIFEST)}(\.tmp)?|{re.escape(_LOCK)}"
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAVE_TOKENS = 16 * 4096


class TraceWriter:
    """Write a trace batch by batch; used with `with`.

    Each batch becomes one shard that is never changed. In a new folder the finished batches can be opened at any
    time, marked incomplete until the writer closes. Over an earlier trace nothing is visible until the writer
    closes: then the new trace takes its place in one step. If the body of `with` raises, an earlier trace stays as
    it was, and without one the finished batches stay, marked incomplete.

    Sample numbers are kept where they are above all earlier ones, and otherwise raised so that they stay unique.

    Args:
        path: the folder; it may be missing, empty or hold an earlier trace.

    Raises:
        TraceError: on entering, if the path is a file, another folder, or in use by another writer; on appending,
            if the batch is not a valid trace or does not fit the earlier ones; on both and on closing, if the disk
            is full or refuses the write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._shards: dict[str, int] = {}
        self._like: xr.Dataset | None = None
        self._top = -1
        self._lock: int | None = None

    def __enter__(self) -> "TraceWriter":
        self._created = not self.path.exists()
        _require_ours(self.path)
        with self._saving():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire(self.path)
        try:
            # What the folder holds for readers at this moment; the shards it names are never touched.
            self._published = self._old = (
                read_manifest(self.path) if (self.path / MANIFEST).exists() else None
            )
            with self._saving():
                self._sweep()
        except BaseException:
            os.close(self._lock)
            raise
        self._generation = self._old.generation + 1 if self._old else 0
        return self

    def append(self, trace: xr.Dataset) -> None:
        """Write one batch.

        Args:
            trace: a valid trace with the same readers, sources, variables and attributes as the earlier batches.

        Raises:
            TraceError: see the class.
        """
        if self._lock is None:
            raise TraceError("append was called outside `with TraceWriter(path) as writer:`")
        require_trace(trace)
        if self._like is None:
            self._like = trace.isel(token=slice(0, 0)).copy(deep=True)
        else:
            require_alike(self._like, trace, f"batch {len(self._shards) + 1}", "the batches before it")
        trace = renumber(trace, self._top)
        name = f"shard-{self._generation:03d}-{len(self._shards):05d}.zarr"
        temporary = self.path / f"{_WRITING}{name}"
        with self._saving():
            if temporary.exists():
                shutil.rmtree(temporary)
            write_shard(trace, temporary)
            _sync_tree(temporary)
            temporary.rename(self.path / name)
            self._shards[name] = trace.sizes["token"]
            self._top = last_sample(trace)
            if self._old is None:
                self._publish(complete=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        except BaseException:
            self._withdraw()
            raise
        else:
            if kind is not None:
                self._withdraw()
        finally:
            os.close(self._lock)
            self._lock = None

    def _commit(self) -> None:
        if not self._shards:
            raise TraceError(f"no batch was appended, so nothing was saved at {self.path}")
        with self._saving():
            self._publish(complete=True)
        # The new trace is in place. What cannot be deleted now, the next writer deletes.
        with contextlib.suppress(OSError):
            self._sweep()

    def _publish(self, complete: bool) -> None:
        manifest = Manifest(complete, self._generation, dict(self._shards))
        manifest.publish(self.path)
        self._published = manifest

    def _withdraw(self) -> None:
        """Remove what no reader can see; the folder too if nothing is left of it."""
        self._sweep()
        if self._published is None:
            (self.path / _LOCK).unlink(missing_ok=True)
            if self._created:
                self.path.rmdir()

    def _sweep(self) -> None:
        """Delete all shards that the manifest does not name: half-written, withdrawn or replaced ones."""
        keep = self._published.shards if self._published else {}
        for entry in sorted(self.path.iterdir()):
            if entry.name in keep or entry.name in (MANIFEST, _LOCK) or not _OURS.fullmatch(entry.name):
                continue
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
                continue
            # Renamed first: a reader that still has the shard open then notices, instead of missing single chunks.
            if SHARD_NAME.fullmatch(entry.name):
                entry = entry.rename(entry.with_name(f"{_DELETED}{entry.name}"))
            shutil.rmtree(entry)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            cause = "disk full" if error.errno in _FULL else (error.strerror or str(error))
            raise TraceError(f"{cause} while saving {self.path}; {self._kept()}") from error

    def _kept(self) -> str:
        if getattr(self, "_old", None):
            return "the earlier trace is untouched"
        published = getattr(self, "_published", None)
        return f"the {len(published.shards)} batches before are kept" if published else "nothing was kept"


def save_trace(trace: xr.Dataset, path: str | Path) -> None:
    """Save a trace to a folder, in place of the trace that is there, if any.

    A trace larger than memory that was opened lazily is saved part by part.

    Args:
        trace: a valid trace.
        path: the folder; it may be missing, empty or hold an earlier trace.

    Raises:
        TraceError: if the trace is not valid or cannot be saved; an earlier trace is then untouched.
    """
    require_trace(trace)
    with TraceWriter(path) as writer:
        for part in _batches(trace):
            writer.append(trace.isel(token=part))


def _batches(trace: xr.Dataset) -> Iterator[slice]:
    """Cut a trace into parts of whole prompts, each the first to reach the batch size."""
    starts = np.flatnonzero(trace.coords["position"].values == 0)
    ends = np.append(starts[1:], trace.sizes["token"])
    start = 0
    for end in ends.tolist():
        if end - start >= _SAVE_TOKENS or end == trace.sizes["token"]:
            yield slice(start, end)
            start = end


def export_zip(path: str | Path, file: str | Path) -> Path:
    """Pack a stored trace into one file, to send or publish it; `open_trace` reads it.

    Args:
        path: folder of the trace.
        file: the zip to write; replaced if it exists.

    Returns:
        The path of the zip.

    Raises:
        TraceError: if there is no trace, or the zip cannot be written.
    """
    path, file = Path(path), Path(file)
    if path.is_file():
        raise TraceError(f"{path} is a file; export_zip packs the folder of a trace")
    manifest = read_manifest(path)
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_entry(MANIFEST), manifest.text())
            for shard in manifest.shards:
                for source in sorted(p for p in (path / shard).rglob("*") if p.is_file()):
                    archive.writestr(_entry(source.relative_to(path).as_posix()), source.read_bytes())
        read_manifest(path)
        temporary.replace(file)
    except OSError as error:
        cause = "disk full" if error.errno in _FULL else (error.strerror or str(error))
        raise TraceError(f"{cause} while exporting {path} to {file}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return file


def _entry(name: str) -> zipfile.ZipInfo:
    # A fixed date, so that the same trace gives the same file.
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))


def _require_ours(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise TraceError(f"{path} is a file; a trace is saved to a folder")
    if not path.is_dir() or (path / MANIFEST).exists():
        return
    other = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    if other:
        raise TraceError(
            f"{path} is a folder with other files ({', '.join(other[:3])}) and no trace; choose another"
        )


def _acquire(path: Path) -> int:
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise TraceError(
            f"another writer is saving to {path}; wait until it is done or choose another folder"
        ) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            sync(Path(root) / name)
        sync(Path(root))
