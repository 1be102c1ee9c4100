"""Save traces so that a crash, a full disk or a second writer never costs a finished one."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import xarray as xr

from resinspect.errors import TraceError
from resinspect.trace.check import require_trace
from resinspect.trace.combine import last_sample, renumber, require_alike
from resinspect.trace.folder import LOCK, WRITING, acquire, cause_of, require_writable, sweep
from resinspect.trace.manifest import Manifest, load_manifest
from resinspect.trace.shard import write_shard

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
            if the batch is not a valid trace or does not fit the earlier ones; on closing, if there was no batch;
            on all three, if the disk is full or refuses the write.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None
        self._earlier: Manifest | None = None
        self._generation = 0
        self._shards: dict[str, int] = {}
        self._tried = 0
        self._like: xr.Dataset | None = None
        self._top = -1

    def __enter__(self) -> "TraceWriter":
        with self._saving():
            require_writable(self.path)
            self._created = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = acquire(self.path)
            try:
                self._earlier = load_manifest(self.path)
                sweep(self.path)
            except BaseException:
                self._release()
                raise
        self._generation = self._earlier.generation + 1 if self._earlier else 0
        self._shards, self._tried, self._like, self._top = {}, 0, None, -1
        return self

    def append(self, trace: xr.Dataset) -> None:
        """Write one batch.

        Args:
            trace: a valid trace with the same readers, sources, variables and attributes as the earlier batches.

        Raises:
            TraceError: see the class; the batch is then not part of the trace.
        """
        self._write(require_trace(trace))

    def _write(self, trace: xr.Dataset) -> None:
        if self._lock is None:
            raise TraceError("append was called outside `with TraceWriter(path) as writer:`")
        if self._like is None:
            self._like = trace.isel(token=slice(0, 0)).copy(deep=True)
        require_alike(self._like, trace, f"batch {len(self._shards) + 1}", "the batches before it")
        trace = renumber(trace, self._top)
        name = f"shard-{self._generation:03d}-{self._tried:05d}.zarr"
        self._tried += 1
        temporary = self.path / f"{WRITING}{name}"
        with self._saving():
            try:
                write_shard(trace, temporary)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            temporary.rename(self.path / name)
            if self._earlier is None:
                self._manifest({**self._shards, name: trace.sizes["token"]}, complete=False).publish(self.path)
        self._shards[name] = trace.sizes["token"]
        self._top = last_sample(trace)

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
            self._release()

    def _commit(self) -> None:
        if not self._shards:
            raise TraceError(f"no batch was appended, so nothing was saved at {self.path}")
        with self._saving():
            if self._earlier is not None:
                # The earlier trace is about to be deleted, so the new one must outlive a power cut. One call for
                # the whole disk, as syncing thousands of small files one by one takes minutes.
                os.sync()
            self._manifest(self._shards, complete=True).publish(self.path)
        # The new trace is in place. What cannot be deleted now, the next writer deletes.
        with contextlib.suppress(OSError):
            sweep(self.path)

    def _manifest(self, shards: dict[str, int], complete: bool) -> Manifest:
        return Manifest(complete, self._generation, dict(shards))

    def _withdraw(self) -> None:
        """Remove what no manifest names; the folder too, if it was ours and nothing is left."""
        sweep(self.path)
        if load_manifest(self.path) is None:
            (self.path / LOCK).unlink(missing_ok=True)
            if self._created:
                self.path.rmdir()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._earlier is not None:
                kept = "the earlier trace is untouched"
            else:
                count = len(self._shards)
                kept = f"batches kept from before: {count}" if count else "nothing was saved"
            raise TraceError(f"{cause_of(error)} while saving {self.path}; {kept}") from error


def save_trace(trace: xr.Dataset, path: str | Path) -> None:
    """Save a trace to a folder, in place of the trace that is there, if any.

    A trace larger than memory that was opened lazily is saved part by part, also onto itself.

    Args:
        trace: a valid trace.
        path: the folder; it may be missing, empty or hold an earlier trace.

    Raises:
        TraceError: if the trace is not valid or cannot be saved; an earlier trace is then untouched.
    """
    require_trace(trace)
    with TraceWriter(path) as writer:
        for part in _batches(trace):
            writer._write(trace.isel(token=part))


def _batches(trace: xr.Dataset) -> Iterator[slice]:
    """Cut a trace into parts of whole prompts, each as short as the batch size allows."""
    ends = np.append(np.flatnonzero(trace.coords["position"].values == 0)[1:], trace.sizes["token"])
    start = 0
    for end in ends.tolist():
        if end - start >= _SAVE_TOKENS or end == trace.sizes["token"]:
            yield slice(start, end)
            start = end
