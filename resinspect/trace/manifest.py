"""The manifest: which shards make up a trace. A shard that is not in it does not count."""

import contextlib
import json
import os
import re
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resinspect.errors import TraceError
from resinspect.trace.schema import CONVENTION

MANIFEST = "manifest.json"
# The pattern also keeps a manifest from naming anything outside its folder.
SHARD_NAME = re.compile(r"shard-[0-9]{3,9}-[0-9]{5,9}\.zarr")


@dataclass(frozen=True)
class Manifest:
    """What makes up a trace on disk.

    Attributes:
        complete: False while a writer has not finished.
        generation: how many times the folder was overwritten; part of every shard name, so that names never recur.
        shards: name -> number of tokens, in order.
    """

    complete: bool
    generation: int
    shards: dict[str, int]

    def text(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps({"convention": CONVENTION, **asdict(self)}, indent=1) + "\n"

    def publish(self, folder: Path) -> None:
        """Replace the manifest of a folder in one step; after a crash either the old or the new one is there."""
        temporary = folder / f"{MANIFEST}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.text())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / MANIFEST)
        # The manifest is in place by now, and some file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            sync(folder)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder, without looking at the shards.

    Args:
        folder: any folder.

    Returns:
        The manifest, None if there is none.

    Raises:
        TraceError: if the file is damaged or belongs to something else.
    """
    file = folder / MANIFEST
    return parse_manifest(file.read_bytes(), file) if file.exists() else None


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a trace.

    Args:
        path: a trace folder, or a zip made by `export_zip`.

    Returns:
        The manifest, every shard of which is there.

    Raises:
        TraceError: if the path is missing, is no trace, has a damaged manifest or lacks a shard.
    """
    try:
        if not path.exists():
            raise TraceError(f"no trace at {path}: there is no such file or folder")
        if path.is_dir():
            manifest = load_manifest(path)
            present = {entry.name for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink()}
        elif zipfile.is_zipfile(path):
            manifest, present = _from_zip(path)
        else:
            raise TraceError(f"{path} is a file; a trace is a folder, or a zip made by export_zip")
    except OSError as error:
        raise TraceError(f"the trace at {path} cannot be read: {error.strerror or error}") from error
    if manifest is None:
        raise TraceError(f"{path} is not a trace: it has no {MANIFEST}")
    missing = [name for name in manifest.shards if name not in present]
    if missing:
        raise TraceError(f"the trace at {path} lacks {', '.join(missing)}, which its manifest names")
    return manifest


def _from_zip(path: Path) -> tuple[Manifest | None, set[str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            manifest = parse_manifest(archive.read(MANIFEST), path / MANIFEST) if MANIFEST in names else None
    except (zipfile.BadZipFile, RuntimeError) as error:
        raise TraceError(f"{path} is a damaged zip: {error}") from error
    return manifest, {name.partition("/")[0] for name in names if "/" in name}


def parse_manifest(data: bytes, file: Path) -> Manifest:
    """Turn the bytes of a manifest into one, trusting none of it.

    Args:
        data: JSON as UTF-8.
        file: where it comes from, for messages.

    Returns:
        The manifest.

    Raises:
        TraceError: if anything in it is not as expected.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "convention" not in fields:
        raise TraceError(f"{file} is not the manifest of a trace: it names no convention")
    if fields["convention"] != CONVENTION:
        raise TraceError(f"{file} has convention {fields['convention']!r}; this version reads {CONVENTION!r}")
    complete, generation, shards = (fields.get(name) for name in ("complete", "generation", "shards"))
    if not (isinstance(complete, bool) and _is_count(generation, 0)):
        raise TraceError(f"{file} is damaged: expected 'complete' to be true or false and 'generation' a whole number")
    if not isinstance(shards, dict) or not shards:
        raise TraceError(f"{file} is damaged: expected 'shards' to map at least one shard to its number of tokens")
    for name, tokens in shards.items():
        if not SHARD_NAME.fullmatch(name):
            raise TraceError(f"{file} names the shard {name!r}; allowed are names like 'shard-000-00000.zarr'")
        if not _is_count(tokens, 1):
            raise TraceError(f"{file} gives shard {name} {tokens!r} tokens; expected a whole number above 0")
    return Manifest(complete, generation, shards)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53
