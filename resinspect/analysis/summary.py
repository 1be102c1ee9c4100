"""From values per token to numbers with their n and interval; resampling is over documents, never over tokens."""

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.errors import OptionError

RESAMPLES = 1000
LEVEL = 0.95


def summarise(
    values: xr.DataArray, *, drop_first: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> pd.DataFrame:
    """Mean and median over tokens, with a bootstrap interval of the mean over documents.

    Tokens whose value is NaN are left out, entry by entry. A document is a prompt (``sample``).

    Args:
        values: A measure with dimension ``token`` and any others.
        drop_first: Leading tokens of every document to leave out, such as 1 for attention sinks.
        resamples: Bootstrap resamples.
        level: Of the interval.
        seed: Of the resampling.

    Returns:
        One row per entry of the other dimensions: their labels, ``mean``, ``median``, ``low``, ``high`` (NaN with fewer
        than two documents: no interval), ``tokens``, ``documents``.

    Raises:
        OptionError: If there is no token dimension, no token is left, or ``level`` is not between 0 and 1.
    """
    if "token" not in values.dims:
        raise OptionError(f"{values.name} has no token dimension to average over; its dimensions are {values.dims}.")
    if not 0 < level < 1:
        raise OptionError(f"level is {level}; it must lie between 0 and 1, such as 0.95.")
    kept = values.transpose("token", ...).isel(token=values.coords["position"].values >= drop_first)
    if not kept.sizes["token"]:
        longest = int(values.coords["position"].max()) + 1 if values.sizes["token"] else 0
        raise OptionError(f"drop_first is {drop_first}, but the longest document has {longest} tokens: none is left.")
    table = kept.values.reshape(kept.sizes["token"], -1).astype(np.float64)
    sums, counts = by_document(table, kept.coords["sample"].values)
    low, high = interval(sums, counts, resamples=resamples, level=level, seed=seed)
    tokens = counts.sum(0)
    columns = {
        "mean": _ratio(sums.sum(0), tokens),
        "median": _medians(table),
        "low": low,
        "high": high,
        "tokens": tokens.astype(np.int64),
        "documents": (counts > 0).sum(0),
    }
    frame = pd.concat([_labels(kept), pd.DataFrame(columns)], axis=1)
    frame.attrs = {"measure": values.name, **values.attrs, "drop_first": drop_first, "level": level}
    return frame


def by_document(table: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts of the known values of ``(token, entry)`` within each document: two ``(document, entry)``."""
    if not len(table):
        return np.zeros((0, table.shape[1])), np.zeros((0, table.shape[1]))
    order = np.argsort(documents, kind="stable")
    starts = np.flatnonzero(np.diff(documents[order], prepend=documents[order[0]] - 1))
    ordered = table[order]
    known = ~np.isnan(ordered)
    return np.add.reduceat(np.where(known, ordered, 0.0), starts), np.add.reduceat(known.astype(np.float64), starts)


def interval(
    sums: np.ndarray, counts: np.ndarray, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap over documents of ``sum / count``, from ``(document, entry)`` each; NaN for one document."""
    documents, entries = sums.shape
    if documents < 2:
        return np.full(entries, np.nan), np.full(entries, np.nan)
    picks = draws(documents, resamples, seed)
    means = _ratio(picks @ sums, picks @ counts)
    enough = (counts > 0).sum(0) >= 2
    bounds = np.full((2, entries), np.nan)
    tail = (1 - level) / 2
    if enough.any():
        bounds[:, enough] = np.nanquantile(means[:, enough], [tail, 1 - tail], axis=0)
    return bounds[0], bounds[1]


def draws(documents: int, resamples: int, seed: int) -> np.ndarray:
    """How often each document is in each resample: ``(resample, document)``."""
    share = np.full(documents, 1 / documents)
    return np.random.default_rng(seed).multinomial(documents, share, size=resamples).astype(np.float64)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.divide(sums, counts, out=np.full(np.shape(sums), np.nan), where=counts > 0)


def _medians(table: np.ndarray) -> np.ndarray:
    """Median of the known values of each column; NaN where there is none."""
    ordered, count = np.sort(table, axis=0), (~np.isnan(table)).sum(0)
    columns = np.arange(table.shape[1])
    if not len(table):
        return np.full(table.shape[1], np.nan)
    middle = [
        ordered[np.maximum((count - 1) // 2, 0), columns],
        ordered[np.minimum(count // 2, len(table) - 1), columns],
    ]
    return np.where(count > 0, np.mean(middle, axis=0), np.nan)


def _labels(values: xr.DataArray) -> pd.DataFrame:
    """One row per entry of the dimensions beside token, one column per dimension."""
    dims = [dim for dim in values.dims if dim != "token"]
    levels = [values.coords[dim].values if dim in values.coords else range(values.sizes[dim]) for dim in dims]
    grid = np.meshgrid(*(np.asarray(level) for level in levels), indexing="ij")
    return pd.DataFrame({dim: column.ravel() for dim, column in zip(dims, grid, strict=True)})
