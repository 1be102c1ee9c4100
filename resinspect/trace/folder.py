"""The folder of a trace: what in it is ours, who may write to it, and how it is kept clean."""

import errno
import os
import re
import shutil
from pathlib import Path

from resinspect.errors import TraceError
from resinspect.trace.manifest import MANIFEST, SHARD_NAME, load_manifest

LOCK = ".lock"
WRITING, _DELETED = ".writing-", ".deleted-"
_OURS = re.compile(
    rf"({re.escape(WRITING)}|{re.escape(_DELETED)})?{SHARD_NAME.pattern}"
    rf"|{re.escape(MANIFEST)}(\.tmp)?|{re.escape(LOCK)}"
)


def cause_of(error: OSError) -> str:
    """Say in words why a write failed."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return "disk full" if error.errno in full else (error.strerror or str(error))


def require_writable(path: Path) -> None:
    """Refuse a path where saving a trace could damage something else.

    Args:
        path: may be missing, an empty folder, a trace, or what a writer that was killed left.

    Raises:
        TraceError: if it is a file or a folder of something else.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise TraceError(f"{path} is a file; a trace is saved to a folder")
    if load_manifest(path) is not None:
        return
    other = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    if other:
        raise TraceError(f"{path} is a folder with other files ({', '.join(other[:3])}) and no trace; choose another")


def acquire(path: Path) -> int:
    """Take the lock of a folder; it ends with the process, however that ends.

    Args:
        path: an existing folder.

    Returns:
        The file descriptor that holds the lock; closing it gives the lock back.

    Raises:
        TraceError: if another writer holds it.
    """
    # Here, as reading traces should not need POSIX.
    import fcntl

    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink == 0:
            # Its holder withdrew, and took the file along, between our two calls.
            raise BlockingIOError
    except BlockingIOError:
        os.close(descriptor)
        raise TraceError(f"another writer is saving to {path}; wait for it to end or choose another folder") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def sweep(path: Path) -> None:
    """Delete every shard that the manifest does not name: half-written, withdrawn or replaced ones.

    Args:
        path: a folder whose lock we hold. Files that are not ours are left alone.
    """
    manifest = load_manifest(path)
    keep = {MANIFEST, LOCK, *(manifest.shards if manifest else ())}
    for entry in sorted(path.iterdir()):
        if entry.name in keep or not _OURS.fullmatch(entry.name):
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
            continue
        # Renamed first: whoever still reads the shard then finds it gone, instead of missing single chunks.
        if SHARD_NAME.fullmatch(entry.name):
            entry = entry.rename(entry.with_name(f"{_DELETED}{entry.name}"))
        shutil.rmtree(entry)
