"""What a path given by the user stands for: a folder, a file, a bundled name or a Hub id."""

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

import resinspect.models  # noqa: F401 - registers the reference model
from resinspect.bundle import bundled
from resinspect.checkpoint.files import PICKLES, Contents, check_folder, check_weights, glance, lone_pickle
from resinspect.errors import CheckpointError

SHOWN = 100
"""Characters of a path that are shown where it cannot be one."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from.

    Attributes:
        where: Folder, Hub id, or a file that comes without config.json; for transformers and for messages.
        name: What traces call the model.
        weights: File that holds or names the weights, for messages.
        arguments: For every ``from_pretrained``.
        contents: What lies there; None for a Hub id.
    """

    where: str
    name: str
    weights: str
    arguments: dict[str, Any]
    contents: Contents | None = None


def find(path: str | os.PathLike[str], *, trust_remote_code: bool, whole: bool = True) -> Source:
    """The source that a path stands for; a folder or file comes before a bundled name, and that before a Hub id.

    Args:
        path: As the user gave it.
        trust_remote_code: For every ``from_pretrained``.
        whole: Look at all files that loading reads; else weights may be missing.

    Raises:
        CheckpointError: If there is none, or its files cannot be read.
    """
    place = locate(path)
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if place is None:
        return Source(str(path), str(path), "its weights", arguments)
    arguments["local_files_only"] = True
    file = lone_file(place)
    if file is not None and not (file.parent / "config.json").exists():
        check_weights(file)
        return Source(str(file), _file_name(file), file.name, arguments, Contents(None, (file,), {}, False))
    folder = place if file is None else file.parent
    contents = check_folder(folder, file) if whole else glance(folder, file)
    check_model_type(folder, contents.config, trust_remote_code)
    name = folder.resolve().name if file is None or file != place else _file_name(file)
    return Source(str(folder), name, contents.weights, arguments, contents)


def locate(path: str | os.PathLike[str]) -> Path | None:
    """The folder or file that a path or a bundled name stands for, None if only the Hub may know it.

    Raises:
        CheckpointError: If it can be neither.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"the model is a {type(path).__name__}; {spelling()}.")
    known = bundled()
    if not str(path).strip():
        raise CheckpointError(f"the model has no name; {spelling()}.")
    try:
        place = Path(path).expanduser()
        there = place.exists()
    except (OSError, RuntimeError) as error:
        # A name too long for the system, no permission to look, the home of an unknown user.
        raise CheckpointError(f"{str(path)[:SHOWN]} cannot be a path here ({_reason(error)}); {spelling()}.") from error
    if there:
        return place
    if path in known:
        return known[path]
    if "/" not in str(path) and (near := get_close_matches(str(path), known)):
        raise CheckpointError(f"there is no folder or bundled checkpoint {path}; did you mean {near[0]}?")
    if place.suffix in PICKLES:
        raise CheckpointError(f"there is no file {place}; {spelling()}.")
    if isinstance(path, str) and HUB_ID.fullmatch(path) and not ("/" in path and place.parent.is_dir()):
        return None
    raise CheckpointError(f"there is no folder {place}; {spelling()}.")


def lone_file(place: Path) -> Path | None:
    """The pickled file that a place is, or that is all the weights it has; None for a Hugging Face folder."""
    return lone_pickle(place) if place.is_dir() else place if place.suffix in PICKLES else None


def spelling() -> str:
    """What can be given, as the end of a sentence."""
    known = f" ({', '.join(bundled())})" if bundled() else ""
    return f"give an existing folder, a bundled name{known}, or an id that the Hugging Face Hub has"


def check_model_type(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse a kind of model that transformers does not know, unless the code that comes with it is trusted.

    Raises:
        CheckpointError: If so.
    """
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        own_code = "auto_map" in config
        trust = "pass trust_remote_code=True (--trust-remote-code) if you trust its own code"
        raise CheckpointError(
            f"{folder / 'config.json'} has model_type {kind!r}, unknown to transformers; correct it, or "
            f"{trust if own_code else 'update transformers'}."
        )


def _reason(error: OSError | RuntimeError) -> str:
    return getattr(error, "strerror", None) or str(error).rstrip(".")


def _file_name(file: Path) -> str:
    file = file.resolve()
    return f"{file.parent.name}/{file.name}"
