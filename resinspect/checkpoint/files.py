"""What can be wrong with the files of a checkpoint, found from their first bytes before anything is loaded."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resinspect.errors import CheckpointError

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""In the order in which transformers looks for them."""
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZER = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors format allows no more."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint folder holds.

    Attributes:
        config: ``config.json``.
        weights: Name of the weights file, or of the index that names its shards.
        has_tokenizer: Whether there is any file of a tokenizer.
    """

    config: dict[str, Any]
    weights: str
    has_tokenizer: bool


def check_folder(folder: Path) -> Contents:
    """Look at every file that loading will read.

    Args:
        folder: Or whatever lies under that path; it exists.

    Raises:
        CheckpointError: If one is missing, is not what its name says, or is cut off.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give the folder that holds it, with config.json and weights.")
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} says that this is an adapter; merge it into its base model "
            "(merge_and_unload) and give the folder of the merged model."
        )
    config = _read_config(folder)
    weights = _find_weights(folder, config)
    for path in _shards(weights) if weights.name.endswith(".index.json") else [weights]:
        _check_weights(path)
    tokenizer = [folder / name for name in TOKENIZER if (folder / name).exists()]
    for path in [*tokenizer, *folder.glob("generation_config.json")]:
        _read_json(path) if path.suffix == ".json" else _check_kind(path)
    return Contents(config, weights.name, bool(tokenizer))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; give the folder that holds it beside the weights.")
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path} has no model_type, so it is not the configuration of a transformer; "
            "use the one that was saved with the model."
        )
    return config


def _find_weights(folder: Path, config: dict[str, Any]) -> Path:
    named = config.get("transformers_weights")
    names = (str(named),) if named else WEIGHTS
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no weights; it needs one of {', '.join(names)}: fetch it into that folder.")


def _shards(index: Path) -> list[Path]:
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; fetch that index again.")
    paths = [index.parent / name for name in sorted(set(shards.values()))]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{index} names {', '.join(missing)}, missing in its folder; fetch the missing shards.")
    return paths


def _check_weights(path: Path) -> None:
    head = _check_kind(path)
    if path.suffix == ".safetensors":
        _check_safetensors(path)
    elif not (zipfile.is_zipfile(path) or head.startswith(b"\x80")):
        raise CheckpointError(f"{path} is not a file of torch.save, or it is cut off; fetch it again.")


def _check_safetensors(path: Path) -> None:
    """Compare the size of the file with what its header promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > LARGEST_HEADER:
            raise CheckpointError(f"{path} is not a safetensors file; fetch the weights again.")
        header = file.read(length)
    if len(header) < length:
        raise CheckpointError(f"{path} is cut off inside its header, after {size} bytes; fetch it again.")
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        expected = 8 + length + end
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path} has a damaged header, or is no safetensors file; fetch it again.") from error
    if size != expected:
        what = "is cut off" if size < expected else "is damaged"
        raise CheckpointError(f"{path} {what}: it has {size} bytes, its header says {expected}; fetch it again.")


def _read_json(path: Path) -> dict[str, Any]:
    _check_kind(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_nan)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); repair it or fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch it again.")
    return value


def _refuse_nan(constant: str) -> float:
    # Some state space models do have Infinity as a limit; NaN is never meant.
    if constant == "NaN":
        raise ValueError("a value is NaN")
    return float(constant)


def _check_kind(path: Path) -> bytes:
    """Refuse what downloads and clones leave in the place of a file; returns the first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its type and permissions.") from error
    if not head:
        raise CheckpointError(f"{path} is empty; fetch it again.")
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; run 'git lfs pull' in its repository, or fetch it."
        )
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        raise CheckpointError(f"{path} is a web page saved under that name; fetch the file itself, not its page.")
    return head
