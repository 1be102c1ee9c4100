"""The manifest: which shards make up a trace. A shard that is not in it does not count."""

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
        sync(folder)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of a trace.

    Args:
        path: a trace folder, or a zip made by `export_zip`.

    Returns:
        The manifest, every shard of which is there.

    Raises:
        TraceError: if the path is missing, is no trace, has a damaged manifest or lacks a shard.
    """
    if not path.exists():
        raise TraceError(f"no trace at {path}: there is no such file or folder")
    if path.is_dir():
        text, present = (
            _from_folder(path),
            {p.name for p in path.iterdir() if p.is_dir() and not p.is_symlink()},
        )
    elif zipfile.is_zipfile(path):
        text, present = _from_zip(path)
    else:
        raise TraceError(f"{path} is a file; a trace is a folder or a .zip made by export_zip")
    manifest = _parse(text, path)
    missing = [name for name in manifest.shards if name not in present]
    if missing:
        raise TraceError(f"the trace at {path} lacks {', '.join(missing)}, which its manifest names")
    return manifest


def _from_folder(path: Path) -> str:
    file = path / MANIFEST
    if not file.is_file():
        raise TraceError(f"{path} is not a trace: it has no {MANIFEST}")
    return file.read_text(encoding="utf-8", errors="replace")


def _from_zip(path: Path) -> tuple[str, set[str]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if MANIFEST not in names:
                raise TraceError(f"{path} is not a trace: it has no {MANIFEST}")
            text = archive.read(MANIFEST).decode("utf-8", errors="replace")
    except zipfile.BadZipFile as error:
        raise TraceError(f"{path} is a damaged zip: {error}") from error
    return text, {name.partition("/")[0] for name in names if "/" in name}


def _parse(text: str, path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{file} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "convention" not in fields:
        raise TraceError(f"{file} is not the manifest of a trace: it names no convention")
    if fields["convention"] != CONVENTION:
        raise TraceError(f"{file} has convention {fields['convention']!r}; this version reads {CONVENTION!r}")
    fields = {name: fields.get(name) for name in ("complete", "generation", "shards")}
    if not (isinstance(fields["complete"], bool) and _is_count(fields["generation"], 0)):
        raise TraceError(f"{file} is damaged: 'complete' has to be true or false and 'generation' a number")
    if not isinstance(fields["shards"], dict) or not fields["shards"]:
        raise TraceError(f"{file} is damaged: 'shards' has to map one shard or more to its number of tokens")
    for name, tokens in fields["shards"].items():
        if not SHARD_NAME.fullmatch(name):
            raise TraceError(
                f"{file} names the shard {name!r}; allowed are names like 'shard-000-00000.zarr'"
            )
        if not _is_count(tokens, 1):
            raise TraceError(f"{file} gives shard {name} {tokens!r} tokens; expected a whole number above 0")
    return Manifest(**fields)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**53
