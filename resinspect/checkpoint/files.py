"""What can be wrong with the files of a checkpoint, found from their first bytes before anything is loaded."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resinspect.checkpoint.refusals import some
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
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of files of ``torch.save``."""
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
"""What training saves in such files beside the weights."""
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors format allows no more."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint folder holds.

    Attributes:
        config: ``config.json``; None where a file of weights has none beside it.
        files: Its weights files.
        kinds: Tensor -> its dtype in the words of safetensors, where these give it without loading.
        has_tokenizer: Whether there is any file of a tokenizer.
        index: The index that names the shards, if there is one.
    """

    config: dict[str, Any] | None
    files: tuple[Path, ...]
    kinds: dict[str, str]
    has_tokenizer: bool
    index: Path | None = None

    @property
    def weights(self) -> str:
        """Name of the file that holds or names the weights."""
        return (self.index or self.files[0]).name if self.files else "its weights"

    @property
    def pickled(self) -> bool:
        """Whether the weights are files of ``torch.save``."""
        return self.files[0].suffix in PICKLES


def check_folder(folder: Path, weights: Path | None = None) -> Contents:
    """Look at every file that loading will read.

    Args:
        folder: Or whatever lies under that path; it exists.
        weights: Its weights file, where it is not one of those that transformers looks for.

    Raises:
        CheckpointError: If one is missing, is not what its name says, or is cut off.
    """
    config = check_config(folder)
    found = weights or find_weights(folder, config)
    index = found if found.name.endswith(".index.json") else None
    files = _present(index) if index else (found,)
    kinds = {name: entry["dtype"] for path in files for name, entry in check_weights(path).items()}
    tokenizer = [folder / name for name in TOKENIZER if (folder / name).exists()]
    for path in [*tokenizer, *folder.glob("generation_config.json")]:
        read_json(path) if path.suffix == ".json" else _check_kind(path)
    return Contents(config, files, kinds, bool(tokenizer), index)


def glance(folder: Path, weights: Path | None = None) -> Contents:
    """As ``check_folder``, but only ``config.json`` must be there.

    Raises:
        CheckpointError: If it cannot be used.
    """
    files = () if weights is None else (weights,)
    return Contents(check_config(folder), files, {}, any((folder / name).exists() for name in TOKENIZER))


def check_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a folder that holds a whole model.

    Raises:
        CheckpointError: If it is no folder, holds an adapter, or has no usable ``config.json``.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file; give the folder that holds it, with config.json and weights, or a "
            f"{', '.join(PICKLES)} file of torch.save."
        )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder / 'adapter_config.json'} says that this is an adapter; merge it into its base model "
            "(merge_and_unload) and give the folder of the merged model."
        )
    return _read_config(folder)


def lone_pickle(folder: Path) -> Path | None:
    """The one file of ``torch.save`` in a folder that has no weights under the usual names.

    Raises:
        CheckpointError: If there are several.
    """
    if any((folder / name).exists() for name in WEIGHTS) or any(folder.glob("*.safetensors")):
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in PICKLES and path.is_file())
    # nanoGPT keeps its training data in .bin files too.
    files = [p for p in files if not p.name.startswith(_NOT_WEIGHTS) and (p.suffix != ".bin" or _is_pickle(p))]
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} has several files of weights ({some(path.name for path in files)}); give one of them."
        )
    return files[0] if files else None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; give the folder that holds it beside the weights.")
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"{path} has no model_type, so it is not the configuration of a transformer; "
            "use the one that was saved with the model."
        )
    return config


def find_weights(folder: Path, config: dict[str, Any]) -> Path:
    """The weights file or index that transformers takes from a folder.

    Raises:
        CheckpointError: If there is none.
    """
    named = config.get("transformers_weights")
    names = (str(named),) if named else WEIGHTS
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} has no weights; it needs one of {', '.join(names)}: fetch it into that folder.")


def read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """Tensor -> file, and how many bytes all files hold, from the index of a sharded checkpoint.

    Raises:
        CheckpointError: If the index holds no such map.
    """
    index = read_json(path)
    found, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{path} has no weight_map from tensors to files; fetch that index again.")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return found, total if isinstance(total, int) else None


def _present(index: Path) -> tuple[Path, ...]:
    paths = tuple(index.parent / name for name in sorted(set(read_index(index)[0].values())))
    if missing := [path.name for path in paths if not path.is_file()]:
        raise CheckpointError(f"{index} names {some(missing)}, missing in its folder; fetch the missing shards.")
    return paths


def check_weights(path: Path) -> dict[str, Any]:
    """Look at a weights file without loading it.

    Returns:
        Its header if it is safetensors: tensor -> ``dtype``, ``shape``, ``data_offsets``; else nothing.

    Raises:
        CheckpointError: If it is not what its name says, or is cut off.
    """
    _check_kind(path)
    if path.suffix == ".safetensors":
        return _read_header(path)
    if not _is_pickle(path):
        raise CheckpointError(f"{path} is not a file of torch.save, or it is cut off; fetch it again.")
    return {}


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or zipfile.is_zipfile(path)


def _read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, whose size must be what the header promises."""
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
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: If the file holds anything else.
    """
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


def _check_kind(path: Path) -> None:
    """Refuse what downloads and clones leave in the place of a file."""
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
