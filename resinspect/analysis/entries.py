"""The values of a trace as tables ``(token, entry)``, entries grouped by reader, without what is not known."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xarray as xr

from resinspect.analysis.inputs import reach, require
from resinspect.analysis.tokens import Labels
from resinspect.errors import OptionError
from resinspect.trace import EPS

# Weights of a static map differ over tokens by the rounding of its dtype, if at all.
ROUNDINGS = 8


@dataclass(frozen=True)
class Block:
    """Readers whose weights are known for the same tokens.

    Attributes:
        readers: Their names (of sites for natives).
        table: ``(token, entry)`` without NaN.
        group: Reader of each entry, an index into ``readers``.
        labels: Of the tokens of the table.
    """

    readers: list[str]
    table: np.ndarray
    group: np.ndarray
    labels: Labels


def read_values(trace: xr.Dataset, of: str | xr.DataArray) -> xr.DataArray:
    """A variable or measure as float64 ``(token, reader, ...)``, NaN where a reader has no such source.

    Raises:
        OptionError: If its first dimension is not token, or it has no other.
        TraceError: If there is no such variable.
    """
    if isinstance(of, str):
        (values,) = require(trace, of)
        found = trace[of].copy(data=np.where(reach(trace), values, np.nan) if of == "weight" else values)
    else:
        found = of.astype(np.float64)
    if found.ndim < 2 or found.dims[0] != "token":
        raise OptionError(f"{found.name} has dimensions {found.dims}; needed are token and one more, such as reader.")
    return found


def rounding(trace: xr.Dataset) -> float:
    """Relative spread over tokens up to which a weight is taken for fixed."""
    return ROUNDINGS * EPS[trace.attrs["dtype"]]


def blocks(values: xr.DataArray, labels: Labels, tolerance: float) -> Iterator[Block]:
    """The values of the kept tokens, in as few blocks as there are different sets of tokens with known weights.

    An entry that is NaN for more than half of the tokens is left out, and then for each reader the tokens with a NaN
    in what remains. A reader of which nothing remains is left out. An entry that differs over tokens by no more than
    ``tolerance`` of the largest is taken for fixed.
    """
    kept = values.values[labels.kept].reshape(labels.document.size, values.shape[1], -1)
    unknown = np.isnan(kept)
    entries = unknown.mean(0) <= 0.5
    rows = ~(unknown & entries).any(-1)
    sets: dict[bytes, list[int]] = {}
    for reader in np.flatnonzero(entries.any(-1) & rows.any(0)).tolist():
        sets.setdefault(np.packbits(rows[:, reader]).tobytes(), []).append(reader)
    dim = values.dims[1]
    names = values.coords[dim].values.tolist() if dim in values.coords else list(range(values.sizes[dim]))
    for readers in sets.values():
        used = rows[:, readers[0]]
        table = np.ascontiguousarray(
            np.concatenate([kept[used, reader][:, entries[reader]] for reader in readers], axis=1)
        )
        fixed = np.ptp(table, axis=0) <= tolerance * np.abs(table).max(0)
        table[:, fixed] = table[0, fixed]
        group = np.repeat(np.arange(len(readers)), entries[readers].sum(-1))
        yield Block([str(names[reader]) for reader in readers], table, group, labels.of(used))
