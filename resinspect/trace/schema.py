"""The trace convention as data: one table of variables, one of coordinates, one of attributes; and `build_trace`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from resinspect.errors import TraceError

CONVENTION = "resinspect-trace/1"
NATIVE_PREFIX = "native_"
METHODS = ("replay", "solve")
# Spacing of the numbers next to 1 in each compute dtype (torch and numpy call this eps).
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Variable:
    """One row of the variable table.

    Attributes:
        dims: dimensions, in order.
        long_name: what it is, for axes and colour bars.
        units: unit, "1" where it has none.
        required: whether every trace has it.
        nonnegative: whether a value below zero is an error.
    """

    dims: tuple[str, ...]
    long_name: str
    units: str = "1"
    required: bool = False
    nonnegative: bool = False


@dataclass(frozen=True)
class Coordinate:
    """One row of the coordinate table.

    Attributes:
        dim: the dimension it labels.
        kind: "str" or "int".
        long_name: what it is.
        required: whether every trace has it.
    """

    dim: str
    kind: str
    long_name: str
    required: bool = True


_READ = ("token", "reader", "source")
_BY_READER = ("token", "reader")
_BY_SOURCE = ("token", "source")

VARIABLES: dict[str, Variable] = {
    "weight": Variable(_READ, "routing weight", required=True),
    "weight_error": Variable(_READ, "uncertainty of the solved routing weight", nonnegative=True),
    "discarded": Variable(_READ, "fraction a scalar weight discards", nonnegative=True),
    "cross": Variable(_READ, "inner product of write and reader input", "activation²"),
    "gram": Variable(("token", "source", "source2"), "inner product of two writes", "activation²"),
    "source_norm": Variable(_BY_SOURCE, "norm of the write", "activation", required=True, nonnegative=True),
    "reader_norm": Variable(
        _BY_READER, "norm of the reader input", "activation", required=True, nonnegative=True
    ),
    "fidelity": Variable(_BY_READER, "relative reconstruction error", required=True, nonnegative=True),
    "kappa": Variable(_BY_READER, "conditioning of the reconstruction", required=True, nonnegative=True),
    "reader_max": Variable(
        _BY_READER, "largest channel of the reader input, absolute", "activation", nonnegative=True
    ),
    "reader_mean": Variable(_BY_READER, "channel mean of the reader input", "activation"),
    "source_max": Variable(
        _BY_SOURCE, "largest channel of the write, absolute", "activation", nonnegative=True
    ),
    "reader_gram": Variable(
        ("token", "reader", "reader2"), "inner product of two reader inputs", "activation²"
    ),
    "stream_weight": Variable(("token", "reader", "stream", "source"), "routing weight in each stream"),
    "loss": Variable(("token",), "loss of predicting the next token", "nats"),
    "logits": Variable(("token", "vocab"), "logit of the next token", "nats"),
    "reader_hidden": Variable(("token", "reader", "hidden"), "reader input", "activation"),
    "source_hidden": Variable(("token", "source", "hidden"), "write", "activation"),
}

COORDINATES: dict[str, Coordinate] = {
    "reader": Coordinate("reader", "str", "reader"),
    "reader_kind": Coordinate("reader", "str", "kind of reader"),
    "reader_layer": Coordinate("reader", "int", "layer of the reader, -1 if none"),
    "reader_prefix": Coordinate("reader", "int", "leading sources that exist when the reader reads"),
    # Only after select(sources=...): the verdict needs how many sources the reconstruction summed over.
    "reader_terms": Coordinate("reader", "int", "sources the reconstruction summed over", required=False),
    "source": Coordinate("source", "str", "source"),
    "source_kind": Coordinate("source", "str", "kind of source"),
    "source_layer": Coordinate("source", "int", "layer of the source, -1 if none"),
    "sample": Coordinate("token", "int", "prompt"),
    "position": Coordinate("token", "int", "position in the prompt"),
    "token_id": Coordinate("token", "int", "token id"),
    "text": Coordinate("token", "str", "token"),
}

ATTRIBUTES: dict[str, type] = {
    "convention": str,
    "model": str,
    "scheme": str,
    "method": str,
    "dtype": str,
    "write_definition": str,
    "source_definition": str,
    "versions": str,
    "hash": str,
    "tolerance": float,
}


def build_trace(
    variables: Mapping[str, Any],
    *,
    readers: Sequence[str],
    sources: Sequence[str],
    coords: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> xr.Dataset:
    """Build a trace from arrays and hold it against the convention.

    Args:
        variables: name -> array with the dims of `VARIABLES`, or name -> (dims, array); `native_*` variables
            need the second form, with "token" first.
        readers: names of the readers in execution order, such as "0.attn" or "final".
        sources: names of the sources in execution order, such as "embed" or "0.mlp".
        coords: the other coordinates of `COORDINATES`, each one-dimensional. Coordinates outside the table are
            given as (dims, values).
        attrs: the attributes of `ATTRIBUTES` except `convention`. `versions` may be a mapping, which is stored
            as JSON. Further attributes may be added.

    Returns:
        The trace, with `long_name` and `units` on every variable.

    Raises:
        TraceError: if the arrays do not fit together or the result violates the convention; all violations are
            in the one message.
    """
    from resinspect.trace.check import require_trace

    data = {name: _variable(name, value) for name, value in variables.items()}
    labels = {"reader": list(readers), "source": list(sources), **coords}
    try:
        trace = xr.Dataset(data, {name: _coordinate(name, value) for name, value in labels.items()})
    except ValueError as error:
        raise TraceError(f"the arrays of the trace do not fit together: {error}") from error
    trace.attrs = {"convention": CONVENTION, **{name: _attribute(value) for name, value in attrs.items()}}
    return require_trace(trace)


def _variable(name: str, value: Any) -> xr.Variable:
    dims, array = value if isinstance(value, tuple) else (None, value)
    if dims is None:
        if name not in VARIABLES:
            raise TraceError(
                f"variable {name!r} is not in the table, so it needs its dims: pass (dims, array), and begin its "
                f"name with {NATIVE_PREFIX!r}; in the table are {', '.join(VARIABLES)}"
            )
        dims = VARIABLES[name].dims
    array = np.asarray(array)
    dims = (dims,) if isinstance(dims, str) else tuple(dims)
    if array.ndim != len(dims):
        raise TraceError(f"variable {name!r} has shape {array.shape}, expected the dims {dims}")
    row = VARIABLES.get(name)
    attrs = (
        {"long_name": row.long_name, "units": row.units}
        if row
        else {"long_name": name.removeprefix(NATIVE_PREFIX).replace("_", " ")}
    )
    return xr.Variable(dims, array, attrs)


def _coordinate(name: str, value: Any) -> xr.Variable:
    row = COORDINATES.get(name)
    if isinstance(value, tuple) and row is None:
        return xr.Variable(value[0], np.asarray(value[1]))
    if row is None:
        return xr.Variable((name,), np.asarray(value))
    # Fixed-width strings would cost every token the width of the longest one.
    array = np.array(list(value), dtype=object) if name == "text" else np.asarray(value)
    if array.ndim != 1:
        raise TraceError(f"coordinate {name!r} has shape {array.shape}, expected one value per {row.dim}")
    return xr.Variable((row.dim,), array, {"long_name": row.long_name})


def _attribute(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True)
    return value.item() if isinstance(value, np.generic) else value
