"""Open a stored trace without reading it: values are read when they are used."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing
from zarr.storage import LocalStore, ZipStore

from resinspect.errors import TraceError
from resinspect.trace.manifest import read_manifest
from resinspect.trace.shard import Shards


def open_trace(path: str | Path) -> xr.Dataset:
    """Open a stored trace lazily.

    Only the manifest and the coordinates are read. A variable is read from its shards when its values are used, and
    then stays in memory with the dataset; of `select(...)` or `.isel(...)` only that part is read. To go through a
    trace that is larger than memory, take parts along `token`.

    Args:
        path: a folder written by `save_trace` or `TraceWriter`, or a zip made by `export_zip`.

    Returns:
        The trace. If its writer did not finish, a UserWarning says so.

    Raises:
        TraceError: if there is no trace, or it is damaged. Damage to the values themselves is found when they are
            read.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if not manifest.complete:
        warnings.warn(
            f"the trace at {path} is incomplete: its writer did not finish after batch {len(manifest.shards)}",
            UserWarning,
            stacklevel=2,
        )
    # Absolute, as values are read later, maybe from another working directory or process.
    place = path.absolute()
    store = LocalStore(place, read_only=True) if path.is_dir() else ZipStore(place, mode="r", read_only=True)
    shards = Shards(store, str(path), list(manifest.shards), list(manifest.shards.values()))
    # By way of a backend, as that is xarray's public door to lazy loading.
    return xr.open_dataset(path, engine=_TraceBackend, shards=shards)


class _TraceBackend(BackendEntrypoint):
    """Hands xarray the variables of a trace, those on `token` unread."""

    def open_dataset(
        self,
        filename_or_obj: Any,
        *,
        drop_variables: str | Iterable[str] | None = None,
        shards: Shards,
    ) -> xr.Dataset:
        attrs, layout = shards.layout()
        with shards.blame(0):
            coords = {name: _coordinate(shards, layout, name) for name in layout["coordinates"]}
            data = {name: _lazy(shards, name) for name in layout["variables"]}
            return xr.Dataset(data, coords, attrs)


def _coordinate(shards: Shards, layout: dict[str, Any], name: str) -> xr.Variable:
    """Read a coordinate whole: they are small, and selecting needs them."""
    if name in layout["names"]:
        entry = layout["names"][name]
        return xr.Variable(entry["dims"], np.array(entry["values"], dtype=np.str_), entry["attrs"])
    if name in layout["token_text"]:
        text = [token for index in range(len(shards)) for token in shards.text(index, name)]
        return xr.Variable(("token",), np.array(text, dtype=object), dict(shards.array(0, f"{name}_end").attrs))
    first = shards.array(0, name)
    dims = first.metadata.dimension_names
    several = range(len(shards)) if dims[:1] == ("token",) else range(1)
    return xr.Variable(dims, _join([shards.read(index, name) for index in several]), dict(first.attrs))


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _lazy(shards: Shards, name: str) -> xr.Variable:
    first = shards.array(0, name)
    values = indexing.LazilyIndexedArray(_JoinedArray(shards, name))
    return xr.Variable(first.metadata.dimension_names, values, dict(first.attrs))


class _JoinedArray(BackendArray):
    """One variable over all shards, joined along `token` (the first dimension)."""

    def __init__(self, shards: Shards, name: str) -> None:
        first = shards.array(0, name)
        self._shards = shards
        self._name = name
        self.shape = (shards.tokens, *first.shape[1:])
        self.dtype = first.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        """Read an outer selection: one integer, slice or index array per dimension."""
        first, *rest = key
        tokens = np.atleast_1d(np.arange(self.shape[0])[first])
        values = np.empty((len(tokens), *(self._picked(axis, k) for axis, k in enumerate(rest, start=1))), self.dtype)
        owner = np.searchsorted(self._shards.ends, tokens, side="right")
        for index in np.unique(owner).tolist():
            here = owner == index
            values[here] = self._read_shard(index, tokens[here] - self._shards.starts[index], rest)
        drop = tuple(axis for axis, k in enumerate(key) if isinstance(k, (int, np.integer)))
        return values.squeeze(drop)

    def _read_shard(self, index: int, tokens: np.ndarray, rest: list[Any]) -> np.ndarray:
        low = int(tokens.min())
        block = self._shards.read(index, self._name, low, int(tokens.max()) + 1)[tokens - low]
        if block.dtype != self.dtype or block.shape[1:] != self.shape[1:]:
            raise TraceError(f"shards {self._shards.names[0]} and {self._shards.names[index]} differ in {self._name!r}")
        for axis, k in enumerate(rest, start=1):
            block = block[(slice(None),) * axis + (k if isinstance(k, slice) else np.atleast_1d(k),)]
        return block

    def _picked(self, axis: int, key: Any) -> int:
        return np.atleast_1d(np.arange(self.shape[axis])[key]).size
