"""Tensors of files that transformers does not read as they are: pickles, wrapped state dicts, prefixed names."""

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from resinspect.checkpoint.files import PICKLES
from resinspect.checkpoint.refusals import explained, some
from resinspect.errors import CheckpointError

WRAPPERS = ("model", "model_state", "model_state_dict", "state_dict")
"""Names under which training code stores the state dict of a model, in the order in which they are looked for."""
COMPILED, PARALLEL = "_orig_mod", "module"
"""What ``torch.compile`` puts in front of the names of any module, and data parallel training of the whole model."""
# All that a pickle may hold beside what torch allows: numbers such as numpy.float64(1.5), under both names that numpy
# has had for the function that makes them.
_NUMBERS = (np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64, np.uint8, np.bool_)
NUMPY_SCALARS = [
    np._core.multiarray.scalar,
    (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(number)) for number in _NUMBERS),
]


def read_pickle(path: Path, device: str = "cpu") -> Any:
    """What ``torch.save`` stored, without running any code that the file may hold.

    Args:
        path: The file.
        device: Where its tensors go, whatever device they were saved from; ``"meta"`` reads shapes only.

    Raises:
        CheckpointError: If it is damaged or holds more than tensors, numbers and plain containers.
    """
    remedy = "fetch it again, or store only the state dict: torch.save(model.state_dict(), path)"
    lazily = device == "meta" and zipfile.is_zipfile(path)
    with explained(f"{path} cannot be loaded", remedy), torch.serialization.safe_globals(NUMPY_SCALARS):
        return torch.load(path, map_location=device, weights_only=True, mmap=lazily)


def read_tensors(files: Iterable[Path], device: str = "cpu") -> dict[str, Tensor]:
    """The state dict in one or more files, out of its wrapper.

    Raises:
        CheckpointError: If a file cannot be read or holds no state dict.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.suffix in PICKLES:
            tensors |= unwrap(read_pickle(path, device), path)
        else:
            with explained(f"{path} cannot be loaded", "fetch it again"):
                tensors |= load_file(path, device=device)
    return tensors


def unwrap(payload: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what ``torch.save`` stored, bare or under the usual names, also one within another.

    Raises:
        CheckpointError: If there is none.
    """
    if isinstance(payload, Mapping) and payload:
        tensors = {n: value for n, value in payload.items() if isinstance(n, str) and isinstance(value, Tensor)}
        if len(tensors) == len(payload):
            return tensors
        inside = [payload[name] for name in WRAPPERS if isinstance(payload.get(name), Mapping)]
        if inside:
            # Some training code keeps settings under "model" and the weights under another name.
            return unwrap(next((item for item in inside if _holds_tensors(item)), inside[0]), path)
        if tensors and not any(isinstance(value, Mapping | list | tuple) for value in payload.values()):
            # Numbers and names that training code left among the weights, such as the epoch.
            return tensors
    holds = some(map(str, payload)) or "nothing" if isinstance(payload, Mapping) else f"a {type(payload).__name__}"
    raise CheckpointError(
        f"{path} holds {holds}, and no state dict, neither bare nor under {', '.join(WRAPPERS)}; "
        "store one there: torch.save(model.state_dict(), path)."
    )


def _holds_tensors(value: Any) -> bool:
    """Whether there is a tensor in a mapping, or in one within it."""
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor)


def has_prefix(name: str) -> bool:
    """Whether a name has a part that only wrappers of a model put there."""
    parts = name.split(".")
    return parts[0] == PARALLEL or COMPILED in parts


def stripped(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors under the names that they have in the model itself, and a note that says what was taken off.

    Raises:
        CheckpointError: If two of them would then have the same name.
    """
    result: dict[str, Tensor] = {}
    taken: dict[str, int] = {}
    for name, tensor in tensors.items():
        short, prefixes = _strip(name)
        if short in result:
            raise CheckpointError(
                f"the weights hold two tensors {short}, with and without {COMPILED}. or {PARALLEL}. before it; "
                "store the state dict of one model."
            )
        result[short] = tensor
        for prefix in dict.fromkeys(prefixes):
            taken[prefix] = taken.get(prefix, 0) + 1
    notes = [f"took {prefix}. off {count} of {len(tensors)} names of tensors" for prefix, count in taken.items()]
    return result, notes


def _strip(name: str) -> tuple[str, list[str]]:
    parts, prefixes = [], []
    for part in name.split("."):
        if part == COMPILED or (part == PARALLEL and not parts):
            prefixes.append(part)
        else:
            parts.append(part)
    return ".".join(parts), prefixes
