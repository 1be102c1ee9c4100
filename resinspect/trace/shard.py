"""One batch as one Zarr group: how a trace is laid out on disk.

Numbers are Zarr arrays with named dimensions. Zarr has no stable type for text yet, so names are JSON in the group's
attributes and the text of tokens is one array of UTF-8 bytes (`text_utf8`) beside the end of each token in it
(`text_end`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.abc.store import Store
from zarr.codecs import ZstdCodec
from zarr.storage import LocalStore

from resinspect.errors import TraceError
from resinspect.trace.check import is_text

CHUNK_TOKENS = 4096
_CHUNK_BYTES = 2**26
_ATTRS, _LAYOUT = "trace", "layout"


def write_shard(trace: xr.Dataset, folder: Path) -> None:
    """Write one trace into a new folder.

    Chunks hold about 4096 tokens (fewer where a chunk would exceed 64 MiB), all readers and all sources. The same
    trace always gives the same bytes.

    Args:
        trace: a valid trace.
        folder: where to write; it must not exist.
    """
    names = {str(n): v for n, v in trace.variables.items() if is_text(v)}
    layout = {
        "coordinates": [str(name) for name in trace.coords],
        "variables": [str(name) for name in trace.data_vars],
        "token_text": [name for name, variable in names.items() if variable.dims == ("token",)],
        "names": {
            name: {"dims": list(v.dims), "attrs": v.attrs, "values": v.values.tolist()}
            for name, v in names.items()
            if v.dims != ("token",)
        },
    }
    group = zarr.create_group(LocalStore(folder), attributes={_ATTRS: dict(trace.attrs), _LAYOUT: layout})
    for name, variable in trace.variables.items():
        if str(name) not in names:
            _write_array(group, str(name), variable)
    for name in layout["token_text"]:
        pieces = [str(token).encode("utf-8") for token in names[name].values]
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        data = np.frombuffer(b"".join(pieces), dtype=np.uint8)
        _write_array(group, f"{name}_utf8", xr.Variable((f"{name}_byte",), data))
        _write_array(group, f"{name}_end", xr.Variable(("token",), ends, names[name].attrs))


def _write_array(group: zarr.Group, name: str, variable: xr.Variable) -> None:
    data = np.asarray(variable.values)
    row = data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=np.int64))
    rows = min(CHUNK_TOKENS, _CHUNK_BYTES // max(row, 1)) if "token" in variable.dims else _CHUNK_BYTES // max(row, 1)
    group.create_array(
        name,
        shape=data.shape,
        dtype=data.dtype,
        chunks=tuple(max(1, size) for size in (min(rows, data.shape[0]), *data.shape[1:])) if data.ndim else (),
        compressors=ZstdCodec(checksum=True),
        # One file per chunk instead of a folder per dimension: a shard is many small files as it is.
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=[str(dim) for dim in variable.dims],
        attributes=dict(variable.attrs),
        # A chunk that equals the fill value would not be written, and could not be told from one that got lost.
        config={"write_empty_chunks": True},
    )[...] = data


class Shards:
    """The shards of one store, opened as they are needed.

    Args:
        store: a folder or a zip.
        where: path of the trace, for messages.
        names: names of the shards, in order.
        tokens: number of tokens of each.
    """

    def __init__(self, store: Store, where: str, names: list[str], tokens: list[int]) -> None:
        self._store = store
        self._where = where
        self.names = names
        self.ends = np.cumsum(tokens)
        self.starts = self.ends - tokens
        self._groups: dict[int, zarr.Group] = {}
        self._arrays: dict[tuple[int, str], zarr.Array] = {}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tokens(self) -> int:
        """Number of tokens of all shards."""
        return int(self.ends[-1])

    def group(self, index: int) -> zarr.Group:
        """Open one shard."""
        if index not in self._groups:
            with self.blame(index):
                self._groups[index] = zarr.open_group(self._store, path=self.names[index], mode="r", zarr_format=3)
        return self._groups[index]

    def layout(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the attributes of the trace and the layout, both as in the first shard."""
        attrs = self.group(0).attrs
        with self.blame(0):
            return dict(attrs[_ATTRS]), dict(attrs[_LAYOUT])

    def array(self, index: int, name: str) -> zarr.Array:
        """Open one array of one shard; refuse it when chunks are missing, which Zarr would fill in silently."""
        if (index, name) not in self._arrays:
            group = self.group(index)
            with self.blame(index):
                array = group[name]
                if array.nchunks_initialized != array.nchunks:
                    raise ValueError(f"{array.nchunks - array.nchunks_initialized} chunks of {name!r} are missing")
                if array.metadata.dimension_names[:1] == ("token",) and array.shape[0] != self._length(index):
                    raise ValueError(f"{name!r} has {array.shape[0]} tokens, the manifest says {self._length(index)}")
            self._arrays[index, name] = array
        return self._arrays[index, name]

    def read(self, index: int, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read a range along the first dimension of one array of one shard."""
        array = self.array(index, name)
        with self.blame(index):
            values = np.asarray(array[start:stop] if array.ndim else array[...])
        if isinstance(self._store, LocalStore) and not (self._store.root / self.names[index]).is_dir():
            raise TraceError(f"{self._where} was overwritten after this trace was opened; open it again")
        return values

    def text(self, index: int, name: str) -> list[str]:
        """Read the text of the tokens of one shard."""
        data = self.read(index, f"{name}_utf8").tobytes()
        ends = self.read(index, f"{name}_end").tolist()
        with self.blame(index):
            return [data[a:b].decode("utf-8") for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    @contextmanager
    def blame(self, index: int) -> Iterator[None]:
        """Turn what goes wrong on a damaged shard into a TraceError that names it."""
        # What Zarr, its codecs and JSON raise on damaged files has no common base.
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TraceError(f"shard {self.names[index]} of {self._where} cannot be read: {cause}") from error

    def _length(self, index: int) -> int:
        return int(self.ends[index] - self.starts[index])
