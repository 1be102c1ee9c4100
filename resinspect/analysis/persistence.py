"""How a write's share in what readers get changes with their distance: its curve, half-life and rate of dilution."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.dilution import contribution_share
from resinspect.analysis.inputs import reach
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES, by_document
from resinspect.errors import OptionError, TraceError


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a curve, and how they are averaged.

    Attributes:
        chosen: bool ``(reader, source)``.
        average: ``(pair, distance)``: over readers of one write first, then over writes alike.
        sources: How many writes there are; the same ones at every distance.
    """

    chosen: np.ndarray
    average: np.ndarray
    sources: int


def write_persistence(trace: xr.Dataset, *, limit: int | None = None) -> xr.DataArray:
    """Share of a write in later readers as a function of distance, averaged over the same writes at every distance.

    Only early writes ever are at a large distance, so a mean over all pairs at a distance would mix how writes fade
    with which writes they are. The curve is that of the writes that have readers at all distances up to ``limit``; each
    counts alike, whatever number of readers (queries, keys, values) share a distance.

    Args:
        trace: With what ``contribution_share`` needs.
        limit: Largest distance; by default half of the longest, rounded up, which the writes of the first half have.

    Returns:
        ``(token, distance)`` of contribution shares, NaN for tokens with an unknown one. Distance 1 is the first reader
        after the write, 2 the next; readers of the same sources are at one distance. The embedding is left out: it is
        no sublayer's write. ``attrs["sources"]`` is the number of writes; only the first has the longest distance.
        Null value ``1 / n`` at a reader of n sources: equal writes read alike. Source: own definition, for the ``1 /
        T`` of essay 003.

    Raises:
        TraceError: If a variable is missing, or no write is read.
        OptionError: If no write has readers up to ``limit``.
    """
    steps = _steps(trace)
    pairs = _pairs(steps, _limit(steps, limit))
    values = contribution_share(trace).values[:, pairs.chosen] @ pairs.average
    coords = {name: trace.coords[name] for name in trace.coords if trace.coords[name].dims == ("token",)}
    distance = ("distance", np.arange(1, values.shape[1] + 1), {"long_name": "distance", "units": "readers"})
    attrs = {"long_name": "share of a write in a reader at that distance", "units": "1", "sources": pairs.sources}
    return xr.DataArray(values, {**coords, "distance": distance}, ("token", "distance"), "write_persistence", attrs)


def persistence_fit(
    trace: xr.Dataset,
    *,
    limit: int | None = None,
    drop_first: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Two numbers for how writes fade, each with a bootstrap interval over documents.

    ``half_life``: distance at which the curve of ``write_persistence`` has fallen to half of its value at distance 1,
    by linear interpolation; infinite if it does not within ``limit``. ``exponent``: slope b of
    ``log |mean share| = a_s + b log n_r`` over sources s and readers r, n_r the number of sources a reader has: the
    essay's claim that each contribution is diluted to ``1 / T`` is b = -1; 0 is no dilution. It uses all distances:
    an intercept for each write takes out which writes they are.

    Args:
        trace: With what ``contribution_share`` needs.
        limit: As for ``write_persistence``; of the half-life only.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        Rows ``half_life`` (in readers) and ``exponent`` with ``value``, ``low``, ``high``, ``null`` (what equal
        orthogonal writes read alike give: shares ``1 / n_r``), ``sources`` (writes behind the value), ``limit`` (the
        largest distance used), ``tokens``, ``documents``. The half-life is NaN where a share is unknown at all tokens.
        Source: own definition, for the ``1 / T`` of essay 003.

    Raises:
        TraceError: If a variable is missing, or no write is read.
        OptionError: If no write has readers up to ``limit``.
    """
    steps = _steps(trace)
    furthest = _limit(steps, limit)
    pairs, every = _pairs(steps, furthest), steps > 0
    kept = trace.coords["position"].values >= drop_first
    sums, counts = by_document(contribution_share(trace).values[kept][:, every], trace.coords["sample"].values[kept])
    picks = bootstrap(len(sums), resamples, seed)
    total = picks @ counts
    means = np.divide(picks @ sums, total, out=np.full(total.shape, np.nan), where=total > 0)
    available = np.broadcast_to(reach(trace).sum(-1)[:, None], steps.shape)
    source = np.broadcast_to(np.arange(steps.shape[1]), steps.shape)[every]
    equal = _half_lives((1 / available)[pairs.chosen][None] @ pairs.average)[0]
    slopes, fitted = _slopes(means, source, available[every])
    found = {
        "half_life": (_half_lives(means[:, pairs.chosen[every]] @ pairs.average), equal, pairs.sources, furthest),
        "exponent": (slopes, -1.0, fitted, int(steps.max(initial=0))),
    }
    rows = []
    for name, (values, null, sources, longest) in found.items():
        low, high = percentiles(values, len(sums), level)
        rows.append((name, values[0], low, high, null, sources, longest, int(kept.sum()), len(sums)))
    columns = ["quantity", "value", "low", "high", "null", "sources", "limit", "tokens", "documents"]
    return pd.DataFrame(rows, columns=columns)


def _steps(trace: xr.Dataset) -> np.ndarray:
    """``(reader, source)``: 1 for the first reader after a write, readers of the same sources as one.

    0 where a reader comes before the write, and for the embedding.
    """
    prefix = trace.coords["reader_prefix"].values
    depth = np.unique(prefix, return_inverse=True)[1]
    before = (np.unique(prefix)[:, None] <= np.arange(trace.sizes["source"])).sum(0)
    steps = np.where(reach(trace), depth[:, None] + 1 - before, 0)
    return np.where(trace.coords["source_kind"].values == "embed", 0, steps)


def _limit(steps: np.ndarray, limit: int | None) -> int:
    longest = int(steps.max(initial=0))
    if not longest:
        raise TraceError("no reader comes after a sublayer's write; persistence needs one.")
    chosen = -(-longest // 2) if limit is None else limit
    if not 1 <= chosen <= longest:
        raise OptionError(f"limit is {chosen}; the first write has readers at distances 1 to {longest}.")
    return chosen


def _pairs(steps: np.ndarray, limit: int) -> _Pairs:
    """The pairs up to a distance of the writes that have them all."""
    chosen = (steps > 0) & (steps <= limit) & (steps.max(0) >= limit)
    source, distance = np.broadcast_to(np.arange(steps.shape[1]), steps.shape)[chosen], steps[chosen]
    readers = np.zeros((steps.shape[1], limit))
    np.add.at(readers, (source, distance - 1), 1)
    sources = int(chosen.any(0).sum())
    average = np.eye(limit)[distance - 1] / (readers[source, distance - 1] * sources)[:, None]
    return _Pairs(chosen, average, sources)


def _half_lives(curves: np.ndarray) -> np.ndarray:
    """Where each curve ``(row, distance)`` first is half of its first value; NaN for a curve with a NaN."""
    found = []
    for curve in curves:
        below = np.flatnonzero(curve <= curve[0] / 2)
        i = int(below[0]) if below.size else 0
        half = np.interp(curve[0] / 2, [curve[i], curve[i - 1]], [i + 1, i]) if i else np.inf
        found.append(np.nan if np.isnan(curve).any() else half)
    return np.array(found)


def _slopes(share: np.ndarray, source: np.ndarray, available: np.ndarray) -> tuple[np.ndarray, int]:
    """Slope of log share on log sources for each row, with an intercept for each source; and how many sources."""
    with np.errstate(divide="ignore"):
        y = np.log(np.abs(share))
    x = np.log(available)
    used = np.isfinite(y).all(0)
    names = np.unique(source[used])
    dummies = (source[used, None] == names).astype(float)
    centre = dummies @ np.diag(1 / dummies.sum(0)) @ dummies.T
    dx = x[used] - centre @ x[used]
    slopes = (y[:, used] - y[:, used] @ centre) @ dx / (dx @ dx) if dx.any() else np.full(len(share), np.nan)
    return slopes, len(names)
