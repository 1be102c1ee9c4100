"""Weights as they lie on disk, from headers and indices alone."""

import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from resinspect.checkpoint.files import PICKLES, check_weights, find_weights, read_index
from resinspect.checkpoint.refusals import some
from resinspect.checkpoint.tensors import COMPILED, PARALLEL, has_prefix, read_pickle, unwrap
from resinspect.errors import CheckpointError

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """What there is of the weights.

    Attributes:
        files: Weights files that are there.
        bytes: Their size together.
        tensors: How many tensors the index or the headers name, None where that takes loading them.
        numbers: Dtype -> how many numbers are stored in it, in the files whose header could be read.
        notes: What is missing, damaged, or named otherwise than in the model; a clause each.
    """

    files: tuple[Path, ...] = ()
    bytes: int = 0
    tensors: int = 0
    numbers: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def stored_in(folder: Path, config: dict[str, Any]) -> Stored:
    """The weights of a Hugging Face folder, whole or not.

    Raises:
        CheckpointError: If its index cannot be read.
    """
    try:
        found = find_weights(folder, config)
    except CheckpointError as error:
        return Stored(notes=(str(error).removesuffix("."),))
    if not found.name.endswith(".index.json"):
        return stored_files((found,))
    index, total = read_index(found)
    paths = [folder / name for name in sorted(set(index.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    stored = stored_files(tuple(path for path in paths if path.is_file()), index)
    notes = (f"{len(missing)} of {len(paths)} shards missing: {some(missing)}",) if missing else ()
    if missing and total is not None:
        notes += (f"{total:,} bytes when complete",)
    return Stored(stored.files, stored.bytes, len(index), stored.numbers, (*notes, *stored.notes))


def stored_files(files: tuple[Path, ...], names: Iterable[str] | None = None) -> Stored:
    """The weights in files that are there.

    Args:
        files: Safetensors or files of ``torch.save``.
        names: Of the tensors, where an index says so.
    """
    numbers: Counter[str] = Counter()
    notes: list[str] = []
    seen: list[str] = []
    for path in files:
        try:
            entries = _entries(path)
        except CheckpointError as error:
            notes.append(str(error).removesuffix("."))
            continue
        seen += entries
        for dtype, count in entries.values():
            numbers[dtype] += count
    names = seen if names is None else list(names)
    if prefixed := sum(map(has_prefix, names)):
        notes.append(f"{COMPILED}. or {PARALLEL}. before {prefixed:,} of {len(names):,} names of tensors")
    return Stored(files, sum(path.stat().st_size for path in files), len(names), numbers, tuple(notes))


def _entries(path: Path) -> dict[str, tuple[str, int]]:
    """Tensor -> its dtype and how many numbers it holds."""
    header = check_weights(path)
    if path.suffix not in PICKLES:
        return {name: (_dtype(entry["dtype"]), prod(entry["shape"])) for name, entry in header.items()}
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is in the old format of torch.save, which shows nothing unless it is loaded.")
    tensors = unwrap(read_pickle(path, "meta"), path)
    return {name: (str(tensor.dtype).removeprefix("torch."), tensor.numel()) for name, tensor in tensors.items()}


def _dtype(code: str) -> str:
    return _DTYPES.get(code, code.lower())
