"""Make a trace out of arrays."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import xarray as xr

from resinspect.errors import TraceError
from resinspect.trace.check import require_trace
from resinspect.trace.schema import CONVENTION, COORDINATES, NATIVE_PREFIX, VARIABLES


class SourceLike(Protocol):
    """A source: `resinspect.anatomy.Source`, or anything with these attributes."""

    @property
    def name(self) -> str:
        """Such as "embed" or "0.mlp"."""

    @property
    def kind(self) -> str:
        """Such as "embed", "attn" or "mlp"."""

    @property
    def layer(self) -> int:
        """Layer, -1 if none."""


class ReaderLike(SourceLike, Protocol):
    """A reader: `resinspect.anatomy.Reader`, or anything with these attributes."""

    @property
    def prefix(self) -> int:
        """How many leading sources exist when it reads."""


def build_trace(
    variables: Mapping[str, Any],
    *,
    readers: Iterable[ReaderLike],
    sources: Iterable[SourceLike],
    tokens: Mapping[str, Any],
    attrs: Mapping[str, Any],
    coords: Mapping[str, Any] | None = None,
) -> xr.Dataset:
    """Build a trace from arrays and hold it against the convention.

    Args:
        variables: name -> array with the dims of `VARIABLES`, or name -> (dims, array); `native_*` variables
            need the second form, with "token" first.
        readers: the readers in execution order.
        sources: the sources in execution order.
        tokens: `sample`, `position`, `token_id` and `text`, one value per token each.
        attrs: the attributes of `ATTRIBUTES` except `convention`. `versions` may be a mapping, which is stored
            as JSON. Further attributes may be added.
        coords: labels of further dims, such as `stream` or `site`: name -> values on the dim of that name, or
            name -> (dims, values).

    Returns:
        The trace, with `long_name` and `units` on every variable of the table.

    Raises:
        TraceError: if the arrays do not fit together or the result violates the convention; all violations are
            in the one message.
    """
    try:
        data = {name: _variable(name, value) for name, value in variables.items()}
        trace = xr.Dataset(data, _labels(list(readers), list(sources), tokens, coords or {}))
    except ValueError as error:
        raise TraceError(f"the arrays of the trace do not fit together: {error}") from error
    trace.attrs = {"convention": CONVENTION, **{name: _attribute(value) for name, value in attrs.items()}}
    return require_trace(trace)


def _labels(
    readers: list[ReaderLike], sources: list[SourceLike], tokens: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, xr.Variable]:
    return {
        **{name: _token_column(name, values) for name, values in tokens.items()},
        "reader": _column("reader", [reader.name for reader in readers]),
        "reader_kind": _column("reader_kind", [reader.kind for reader in readers]),
        "reader_layer": _column("reader_layer", [reader.layer for reader in readers]),
        "reader_prefix": _column("reader_prefix", [reader.prefix for reader in readers]),
        "source": _column("source", [source.name for source in sources]),
        "source_kind": _column("source_kind", [source.kind for source in sources]),
        "source_layer": _column("source_layer", [source.layer for source in sources]),
        **{name: _extra(name, values) for name, values in extra.items()},
    }


def _variable(name: str, value: Any) -> xr.Variable:
    dims, array = value if isinstance(value, tuple) else (None, value)
    row = VARIABLES.get(name)
    if dims is None and row is None:
        raise TraceError(
            f"variable {name!r} is not in the table, so it needs its dims: pass (dims, array), and begin its name "
            f"with {NATIVE_PREFIX!r}; in the table are {', '.join(VARIABLES)}"
        )
    array = np.asarray(array)
    dims = row.dims if dims is None and row else (dims,) if isinstance(dims, str) else tuple(dims)
    if array.ndim != len(dims):
        raise TraceError(f"variable {name!r} has shape {array.shape}; expected the dims {dims}")
    if row:
        return xr.Variable(dims, array, {"long_name": row.long_name, "units": row.units})
    return xr.Variable(dims, array, {"long_name": name.removeprefix(NATIVE_PREFIX).replace("_", " ")})


def _token_column(name: str, values: Any) -> xr.Variable:
    if name not in COORDINATES or COORDINATES[name].dim != "token":
        known = ", ".join(name for name, row in COORDINATES.items() if row.dim == "token")
        raise TraceError(f"{name!r} is not a coordinate of tokens; expected {known}")
    return _column(name, values)


def _column(name: str, values: Any) -> xr.Variable:
    row = COORDINATES[name]
    # Text as objects: at fixed width every token would take the space of the longest.
    array = np.array(list(values), dtype=object) if name == "text" else np.asarray(values)
    if array.ndim != 1:
        raise TraceError(f"coordinate {name!r} has shape {array.shape}; expected one value per {row.dim}")
    return xr.Variable((row.dim,), array, {"long_name": row.long_name})


def _extra(name: str, values: Any) -> xr.Variable:
    dims, array = values if isinstance(values, tuple) else ((name,), values)
    return xr.Variable(dims, np.asarray(array))


def _attribute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True)
    if isinstance(value, (list, tuple)):
        return [_attribute(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value
