"""Pack a stored trace into a single file."""

import zipfile
from pathlib import Path

from resinspect.errors import TraceError
from resinspect.trace.folder import cause_of
from resinspect.trace.manifest import MANIFEST, read_manifest


def export_zip(path: str | Path, file: str | Path) -> Path:
    """Pack a stored trace into one zip, to send or publish it; `open_trace` reads it.

    The same trace always gives the same file.

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
        try:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr(_entry(MANIFEST), manifest.text())
                for shard in manifest.shards:
                    for part in sorted(p for p in (path / shard).rglob("*") if p.is_file()):
                        archive.writestr(_entry(part.relative_to(path).as_posix()), part.read_bytes())
            # Raises if a writer replaced the trace meanwhile.
            read_manifest(path)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"{cause_of(error)} while exporting {path} to {file}") from error
    return file


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
