"""Take parts of a trace and join traces."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xarray as xr

from resinspect.errors import TraceError

_MIRROR = {"reader": "reader2", "source": "source2"}


def select(
    trace: xr.Dataset,
    *,
    samples: int | Iterable[int] | None = None,
    tokens: int | slice | Sequence[int] | np.ndarray | None = None,
    readers: str | Iterable[str] | None = None,
    sources: str | Iterable[str] | None = None,
) -> xr.Dataset:
    """Take a part of a trace; all dimensions stay.

    Readers, sources and samples keep the order of the trace. After `sources`, `reader_prefix` counts the leading
    sources that are left, and `reader_terms` keeps how many there were, so that the verdict does not change. After
    `tokens`, a sample may have gaps: fine for measuring, but no longer a whole trace that could be saved.

    Args:
        trace: a trace; a lazy one stays lazy.
        samples: numbers of the prompts to keep.
        tokens: indices along `token`, a slice or a boolean mask, counted after `samples` was applied.
        readers: names of the readers to keep.
        sources: names of the sources to keep.

    Returns:
        The part.

    Raises:
        TraceError: if a sample, token, reader or source is not in the trace.
    """
    if samples is not None:
        wanted = [samples] if isinstance(samples, (int, np.integer)) else list(samples)
        found = trace.coords["sample"].values
        _require_known("sample", wanted, np.unique(found).tolist())
        trace = trace.isel(token=np.flatnonzero(np.isin(found, np.array(wanted, dtype=np.int64))))
    if tokens is not None:
        trace = trace.isel(token=_token_indices(tokens, trace.sizes["token"]))
    if readers is not None:
        trace = _select_names(trace, "reader", readers)
    if sources is not None:
        trace = _select_sources(trace, sources)
    return trace


def concat(traces: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join traces of the same model along `token`.

    Args:
        traces: traces with the same readers, sources, variables and attributes. Sample numbers are kept where
            they are above all earlier ones, and otherwise raised so that they stay unique.

    Returns:
        One trace, in memory.

    Raises:
        TraceError: if there is none, or saying in what they differ.
    """
    traces = list(traces)
    if not traces:
        raise TraceError("no traces were given to concat; expected at least one")
    parts = [traces[0]]
    top = last_sample(traces[0])
    for number, trace in enumerate(traces[1:], start=2):
        require_alike(traces[0], trace, f"trace {number}", "trace 1")
        parts.append(renumber(trace, top))
        top = last_sample(parts[-1])
    if len(parts) == 1:
        return parts[0]
    return xr.concat(
        parts,
        dim="token",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="override",
        combine_attrs="override",
    )


def last_sample(trace: xr.Dataset) -> int:
    """Return the largest sample number of a trace, -1 if it has no tokens."""
    return int(trace.coords["sample"].max()) if trace.sizes["token"] else -1


def renumber(trace: xr.Dataset, top: int) -> xr.Dataset:
    """Raise the sample numbers of a trace above `top`, unless they already are."""
    sample = trace.coords["sample"]
    if not sample.size or int(sample.min()) > top:
        return trace
    moved = sample.values + (top + 1 - int(sample.min()))
    return trace.assign_coords(sample=("token", moved, sample.attrs))


def require_alike(first: xr.Dataset, other: xr.Dataset, name: str, first_name: str) -> None:
    """Refuse two traces that cannot share one `token` dimension.

    Args:
        first: a trace.
        other: another trace.
        name: what to call `other` in the message.
        first_name: what to call `first` in the message.

    Raises:
        TraceError: naming everything in which they differ.
    """
    found = [*_attribute_differences(first, other), *_variable_differences(first, other)]
    if found:
        raise TraceError(f"{name} cannot be joined to {first_name}: it differs in {'; '.join(found)}")


def _attribute_differences(first: xr.Dataset, other: xr.Dataset) -> Iterator[str]:
    for name in dict.fromkeys([*first.attrs, *other.attrs]):
        if first.attrs.get(name) != other.attrs.get(name):
            yield f"attribute {name!r} ({other.attrs.get(name)!r} against {first.attrs.get(name)!r})"


def _variable_differences(first: xr.Dataset, other: xr.Dataset) -> Iterator[str]:
    for name in dict.fromkeys([*first.variables, *other.variables]):
        if name not in first.variables or name not in other.variables:
            yield f"{name!r} (only in {'the second' if name in other.variables else 'the first'})"
            continue
        ours, theirs = _form(first, str(name)), _form(other, str(name))
        if ours != theirs:
            yield f"{name!r} ({theirs} against {ours})"
        elif "token" not in first[name].dims and not np.array_equal(first[name].values, other[name].values):
            yield f"{name!r} (other values)"


def _form(trace: xr.Dataset, name: str) -> str:
    variable = trace.variables[name]
    sizes = ", ".join(f"{dim} {size}" for dim, size in variable.sizes.items() if dim != "token")
    # How wide strings are stored does not matter; numbers of another width were rounded differently, or overflow.
    kind = "text" if variable.dtype.kind in "UOT" else variable.dtype.name
    return f"{', '.join(map(str, variable.dims))}; {kind}; {sizes}"


def _require_known(what: str, wanted: list, known: list) -> None:
    missing = [item for item in wanted if item not in set(known)]
    if missing:
        shown = ", ".join(map(repr, known[:40])) + (", ..." if len(known) > 40 else "")
        raise TraceError(f"no {what} {', '.join(map(repr, missing))} in this trace; it has {shown}")


def _token_indices(tokens: int | slice | Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    picked = tokens if isinstance(tokens, slice) else np.atleast_1d(np.asarray(tokens))
    if isinstance(picked, np.ndarray) and picked.size == 0:
        picked = picked.astype(np.int64)
    try:
        return np.arange(size)[picked]
    except IndexError as error:
        raise TraceError(f"tokens {tokens!r} do not fit this trace of {size} tokens: {error}") from error


def _select_names(trace: xr.Dataset, dim: str, names: str | Iterable[str]) -> xr.Dataset:
    wanted = [names] if isinstance(names, str) else [str(name) for name in names]
    known = [str(name) for name in trace.coords[dim].values]
    _require_known(dim, wanted, known)
    keep = [index for index, name in enumerate(known) if name in set(wanted)]
    return trace.isel({d: keep for d in (dim, _MIRROR[dim]) if d in trace.dims})


def _select_sources(trace: xr.Dataset, names: str | Iterable[str]) -> xr.Dataset:
    part = _select_names(trace, "source", names)
    prefix = trace.coords["reader_prefix"]
    kept = np.isin(trace.coords["source"].values.astype(str), part.coords["source"].values.astype(str))
    left = np.concatenate([[0], np.cumsum(kept)])[prefix.values]
    terms = trace.coords.get("reader_terms", prefix)
    return part.assign_coords(
        reader_prefix=("reader", left, prefix.attrs), reader_terms=("reader", terms.values, terms.attrs)
    )
