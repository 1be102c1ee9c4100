"""The routing map: which reader takes how much of which source."""

import operator

import numpy as np
import xarray as xr

from resinspect.errors import OptionError
from resinspect.figures.description import Heatmap, colour_range
from resinspect.figures.labels import visible_text
from resinspect.trace import VARIABLES, describe, select, verdict

_DIMS = ("token", "reader", "source")
_CHUNK = 4096


def routing_map(
    trace: xr.Dataset,
    *,
    token: int | None = None,
    value: str = "weight",
    limits: tuple[float, float] | None = None,
) -> Heatmap:
    """Map readers against sources, averaged over all tokens of a trace or for one of them.

    Readers run top to bottom and sources left to right, both in execution order. A cell is blank where the source
    does not exist yet when the reader reads, and crossed out where its value is not identifiable. The average is
    taken of the per-token values that are known. Maps of single tokens share one colour range, that of all tokens
    of the trace, so that they can be compared.

    Args:
        trace: A trace.
        token: Index along ``token``; None averages over all tokens.
        value: A variable of the trace with the dims token, reader and source.
        limits: Where the colours start and end, (0, x) or (-x, x): to compare maps, or where few values are much
            larger than the others. None fits them to the values. Cells beyond have the last colour, and the caption
            says so.

    Returns:
        The description, for ``save_figure``, ``to_plotly`` or ``to_matplotlib``; a notebook shows it.

    Raises:
        OptionError: If the trace has no such token or variable, or the limits are not of that form.
    """
    _require_value(trace, value)
    token = _require_token(trace, token)
    part = trace if token is None else select(trace, tokens=token)
    values, known = _mean(part[value])
    if limits is None:
        limits = colour_range(*_extremes(values if token is None else trace[value]))
    readable = np.arange(trace.sizes["source"]) < trace.coords["reader_prefix"].values[:, None]
    long_name, units = trace[value].attrs.get("long_name", value), trace[value].attrs.get("units", "1")
    return Heatmap(
        values=values,
        x=_names(trace, "source"),
        y=_names(trace, "reader"),
        title=f"{_model(trace)} · {long_name}, {_what(trace, token)}",
        label=long_name if units == "1" else f"{long_name} [{units}]",
        caption="\n".join([*_caption(part, token, readable, known), *_beyond(values, limits)]),
        limits=limits,
        marks=tuple(str(word) for word in verdict(part).values),
        unknown=readable & (known == 0),
        notes=_notes(part, token, known),
    )


def _require_value(trace: xr.Dataset, value: str) -> None:
    allowed = [name for name, row in VARIABLES.items() if row.dims == _DIMS and name in trace]
    if value not in allowed:
        raise OptionError(f"value is {value!r}; this trace can be mapped by {', '.join(allowed)}.")


def _require_token(trace: xr.Dataset, token: int | None) -> int | None:
    count = trace.sizes["token"]
    if count == 0:
        raise OptionError("the trace has no tokens, so there is nothing to map.")
    if token is None:
        return None
    if not 0 <= (index := operator.index(token)) < count:
        raise OptionError(f"token is {index}; this trace of {count} tokens has 0 to {count - 1}.")
    return index


def _mean(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the tokens whose value is known, NaN where none is, and how many there are: (reader, source)."""
    total = np.zeros(values.shape[1:])
    known = np.zeros(values.shape[1:], dtype=np.int64)
    for chunk in _chunks(values):
        here = ~np.isnan(chunk)
        total += np.where(here, chunk, 0.0).sum(axis=0)
        known += here.sum(axis=0)
    return np.where(known > 0, total / np.maximum(known, 1), np.nan), known


def _extremes(values: xr.DataArray | np.ndarray) -> tuple[float, float]:
    parts = _chunks(values) if isinstance(values, xr.DataArray) else [values]
    found = [(np.nanmin(part), np.nanmax(part)) for part in parts if not np.isnan(part).all()]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else (np.nan, np.nan)


def _chunks(values: xr.DataArray) -> "list[np.ndarray] | map":
    """Tokens a few thousand at a time: a trace may be larger than memory."""
    starts = range(0, values.shape[0], _CHUNK)
    return map(lambda start: values[start : start + _CHUNK].values.astype(np.float64), starts)


def _names(trace: xr.Dataset, dim: str) -> tuple[str, ...]:
    return tuple(visible_text(str(name)) for name in trace.coords[dim].values)


def _model(trace: xr.Dataset) -> str:
    model, scheme = visible_text(trace.attrs["model"]), trace.attrs["scheme"]
    return model if scheme in model else f"{model} ({scheme})"


def _what(trace: xr.Dataset, token: int | None) -> str:
    if token is None:
        return f"mean over {_count(trace.sizes['token'], 'token')}"
    return f"token {token} '{visible_text(str(trace.coords['text'].values[token]))}'"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _caption(part: xr.Dataset, token: int | None, readable: np.ndarray, known: np.ndarray) -> list[str]:
    tokens = part.sizes["token"]
    sample, position = part.coords["sample"].values, part.coords["position"].values
    if token is None:
        what = (
            f"Mean of the per-token values of {_count(tokens, 'token')} of {_count(np.unique(sample).size, 'prompt')}."
        )
    else:
        what = f"Token {token}: prompt {sample[0]}, position {position[0]}."
    lines = [describe(part), f"Model {part.attrs['model']}. {what} Blank: source not written yet."]
    if (lost := readable & (known == 0)).any():
        lines.append(f"Crossed out: not identifiable ({_count(int(lost.sum()), 'cell')}).")
    partly = readable & (known > 0) & (known < tokens)
    if partly.any():
        most = tokens - known[partly].min()
        lines.append(
            f"Left out of the mean where not identifiable: up to {most} of {tokens} tokens, "
            f"in {_count(int(partly.sum()), 'cell')}."
        )
    return lines


def _beyond(values: np.ndarray, limits: tuple[float, float]) -> list[str]:
    lowest, highest = _extremes(values)
    # A scale from 0 shows what is below 0 by less than one of its steps as 0.
    if highest <= limits[1] and lowest >= (limits[0] or -limits[1] / 255):
        return []
    return [f"Colours from {limits[0]:.3g} to {limits[1]:.3g}; the values go from {lowest:.3g} to {highest:.3g}."]


def _notes(part: xr.Dataset, token: int | None, known: np.ndarray) -> np.ndarray:
    """Beside each value: the fidelity of its reader, and how many tokens it averages where that is not all."""
    tokens = part.sizes["token"]
    words = verdict(part).values
    fidelity = part["fidelity"].values
    worst = np.where(np.isnan(fidelity), -np.inf, fidelity).max(axis=0)
    name = "fidelity" if token is not None else "worst fidelity"
    notes = np.empty(known.shape, dtype=object)
    for reader, source in np.ndindex(known.shape):
        figure = f"{worst[reader]:.1e}" if worst[reader] >= 0 else "not known"
        some = 0 < known[reader, source] < tokens
        notes[reader, source] = f"{name} {figure} · {words[reader]}" + (
            f"\nmean of {known[reader, source]} of {tokens} tokens" if some else ""
        )
    return notes
