"""Hold a dataset against the trace convention: every violation, one sentence each."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from resinspect.errors import TraceError
from resinspect.trace.schema import (
    ALLOWED,
    ATTRIBUTES,
    CONVENTION,
    COORDINATES,
    NATIVE_PREFIX,
    VARIABLES,
)

# A Gram with its axes mixed up is off by order one; one computed in bfloat16 by less than a percent.
_SYMMETRY = 0.03
_BLOCK = 4096


def check_trace(trace: xr.Dataset) -> list[str]:
    """List every violation of the trace convention.

    Values are read in blocks of tokens, so a trace opened lazily is checked without loading it whole.

    Args:
        trace: the dataset to check; it is not changed.

    Returns:
        One sentence per violation, naming what was found and what is expected; empty if there is none.
    """
    structure = [*_attributes(trace), *_coordinates(trace), *_variables(trace)]
    return [*structure, *_names(trace), *_tokens(trace), *_values(trace)]


def require_trace(trace: xr.Dataset) -> xr.Dataset:
    """Return the trace unchanged if it follows the convention.

    Args:
        trace: the dataset to check.

    Returns:
        The same object.

    Raises:
        TraceError: with every violation in one message.
    """
    found = check_trace(trace)
    if found:
        count = "1 violation" if len(found) == 1 else f"{len(found)} violations"
        raise TraceError(f"not a valid trace ({count} of {CONVENTION}):\n" + "\n".join(f"- {s}" for s in found))
    return trace


def is_text(variable: xr.Variable | xr.DataArray) -> bool:
    """Say whether a variable holds strings only."""
    if variable.dtype.kind == "O":
        return all(isinstance(item, str) for item in variable.values.flat)
    return variable.dtype.kind in "UT"


def _attributes(trace: xr.Dataset) -> Iterator[str]:
    for name, kind in ATTRIBUTES.items():
        if name not in trace.attrs:
            yield f"attribute {name!r} is missing; expected a {kind.__name__}"
            continue
        value = trace.attrs[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            yield f"attribute {name!r} is {value!r}; expected a {kind.__name__}"
        elif name in ALLOWED and value not in ALLOWED[name]:
            yield f"attribute {name!r} is {value!r}; expected one of {', '.join(map(repr, ALLOWED[name]))}"
        elif name == "tolerance" and not 0 < value < np.inf:
            yield f"attribute 'tolerance' is {value!r}; expected a finite number above 0"
    for owner, attrs in [("", trace.attrs), *((f" of {n!r}", v.attrs) for n, v in trace.variables.items())]:
        for name, value in attrs.items():
            if not _is_plain(value):
                yield f"attribute {name!r}{owner} is {value!r}; expected text, a finite number or a list of them"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, (str, bool, int)) or (isinstance(value, float) and np.isfinite(value))


def _coordinates(trace: xr.Dataset) -> Iterator[str]:
    for name, row in COORDINATES.items():
        if name not in trace.coords:
            if row.required:
                yield f"coordinate {name!r} is missing; expected {row.kind} on {row.dim!r} ({row.long_name})"
            continue
        found = trace.coords[name]
        if found.dims != (row.dim,):
            yield f"coordinate {name!r} has dims {found.dims}; expected ({row.dim!r},)"
        elif not (is_text(found) if row.kind == "str" else found.dtype.kind in "iu"):
            yield f"coordinate {name!r} has dtype {found.dtype}; expected {row.kind}"
    for name, found in trace.coords.items():
        if name not in COORDINATES and found.dtype.kind not in "fiub" and not is_text(found):
            yield f"coordinate {name!r} has dtype {found.dtype}; expected numbers or text"


def _variables(trace: xr.Dataset) -> Iterator[str]:
    for name, row in VARIABLES.items():
        if row.required and name not in trace.data_vars:
            yield f"variable {name!r} is missing; expected dims {row.dims} ({row.long_name})"
    for name, found in trace.data_vars.items():
        row = VARIABLES.get(str(name))
        if row is None and not str(name).startswith(NATIVE_PREFIX):
            allowed = ", ".join(VARIABLES)
            yield f"variable {name!r} is unknown; expected one of {allowed}, or a name beginning {NATIVE_PREFIX!r}"
        elif row is None and found.dims[:1] != ("token",):
            yield f"variable {name!r} has dims {found.dims}; expected 'token' first"
        elif row is None and found.dtype.kind not in "fiub":
            yield f"variable {name!r} has dtype {found.dtype}; expected numbers"
        elif row is not None and found.dims != row.dims:
            yield f"variable {name!r} has dims {found.dims}; expected {row.dims}"
        elif row is not None and found.dtype.kind != "f":
            yield f"variable {name!r} has dtype {found.dtype}; expected a float"
    for dim, other in (("source", "source2"), ("reader", "reader2")):
        if other in trace.sizes and trace.sizes[other] != trace.sizes.get(dim):
            yield f"dim {other!r} has length {trace.sizes[other]}; expected {trace.sizes.get(dim)} as {dim!r}"


def _names(trace: xr.Dataset) -> Iterator[str]:
    for dim in ("reader", "source"):
        if not _usable(trace, dim):
            continue
        names, counts = np.unique(trace.coords[dim].values.astype(str), return_counts=True)
        if (counts > 1).any():
            yield f"{dim} names {', '.join(map(repr, names[counts > 1].tolist()))} are repeated; expected each once"
    if _usable(trace, "reader_prefix") and "source" in trace.sizes:
        prefix, most = trace.coords["reader_prefix"].values, trace.sizes["source"]
        if ((prefix < 0) | (prefix > most)).any():
            found = f"coordinate 'reader_prefix' goes from {prefix.min()} to {prefix.max()}"
            yield f"{found}; expected 0 to {most}, the number of sources"


def _tokens(trace: xr.Dataset) -> Iterator[str]:
    if not trace.sizes.get("token"):
        yield "the trace has no tokens; expected at least one on dim 'token'"
        return
    if not (_usable(trace, "sample") and _usable(trace, "position")):
        return
    sample, position = trace.coords["sample"].values, trace.coords["position"].values
    starts = np.flatnonzero(np.r_[True, sample[1:] != sample[:-1]])
    names, runs = np.unique(sample[starts], return_counts=True)
    if (runs > 1).any():
        yield f"the tokens of sample {names[runs > 1][0]} are not next to each other; expected each sample in one piece"
        return
    lengths = np.diff(np.r_[starts, len(sample)])
    expected = np.arange(len(sample)) - np.repeat(starts, lengths)
    for at in np.flatnonzero(position != expected)[:1]:
        yield (
            f"coordinate 'position' is {position[at]} at token {at} (sample {sample[at]}); expected {expected[at]}, "
            "as positions count up from 0 in each sample"
        )
    if _usable(trace, "loss"):
        last = starts + lengths - 1
        for at in last[~np.isnan(trace["loss"].values[last])][:1]:
            yield f"variable 'loss' is {trace['loss'].values[at]:g} at token {at}, the last of its sample; expected NaN"


def _values(trace: xr.Dataset) -> Iterator[str]:
    """Check the values of every variable whose form is right; one sentence per variable, for its first offence."""
    names = [str(name) for name in trace.data_vars if str(name) in VARIABLES and _usable(trace, str(name))]
    clean = set(names)
    for start in range(0, trace.sizes.get("token", 0), _BLOCK):
        block = trace.isel(token=slice(start, start + _BLOCK))
        for name in [name for name in names if name in clean]:
            for sentence in _value_checks(block, name, start):
                clean.discard(name)
                yield sentence


def _value_checks(block: xr.Dataset, name: str, start: int) -> Iterator[str]:
    dims = VARIABLES[name].dims
    beyond = "reader" in dims and dims[-1] == "source" and _usable(block, "reader_prefix")
    symmetric = dims[-1] in ("source2", "reader2") and len({block.sizes[dim] for dim in dims[1:]}) == 1
    if not (VARIABLES[name].nonnegative or beyond or symmetric):
        return
    values = block[name].values
    if VARIABLES[name].nonnegative:
        for at in np.argwhere(values < 0)[:1]:
            where = _where(block, dims, at, start)
            yield f"variable {name!r} is {values[tuple(at)]:g} at {where}; expected no value below 0"
    if beyond:
        prefix = block.coords["reader_prefix"].values
        absent = np.arange(block.sizes["source"]) >= prefix[:, None]
        if len(dims) == 4:
            absent = absent[:, None, :]
        for at in np.argwhere(~np.isnan(values) & absent)[:1]:
            yield (
                f"variable {name!r} is {values[tuple(at)]:g} at {_where(block, dims, at, start)}, a source beyond that "
                f"reader's prefix of {prefix[at[1]]}; expected NaN"
            )
    if symmetric:
        norm = np.sqrt(np.abs(np.diagonal(values, axis1=1, axis2=2)).astype(np.float64))
        with np.errstate(invalid="ignore"):
            gap = np.abs(values - np.swapaxes(values, 1, 2))
        for at in np.argwhere(gap > _SYMMETRY * norm[:, :, None] * norm[:, None, :])[:1]:
            where = _where(block, dims, at, start)
            yield f"variable {name!r} is not symmetric at {where}; expected the same value both ways"


def _where(block: xr.Dataset, dims: tuple[str, ...], at: np.ndarray, start: int) -> str:
    parts = [f"token {start + at[0]}"]
    for dim, index in zip(dims[1:], at[1:].tolist(), strict=True):
        label = repr(str(block.coords[dim].values[index])) if dim in block.coords else str(index)
        parts.append(f"{dim} {label}")
    return ", ".join(parts)


def _usable(trace: xr.Dataset, name: str) -> bool:
    """Say whether a variable or coordinate is there in the right form, so that its values can be looked at."""
    if name not in trace.variables:
        return False
    found = trace.variables[name]
    if name in VARIABLES:
        return found.dims == VARIABLES[name].dims and found.dtype.kind == "f"
    row = COORDINATES[name]
    return found.dims == (row.dim,) and (row.kind == "str" or found.dtype.kind in "iu")
