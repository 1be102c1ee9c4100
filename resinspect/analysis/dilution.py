"""Dilution: how much of what a reader gets comes from each write, and how fast writes fade with depth."""

from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import (
    contribution_norms,
    contributions,
    labelled,
    own_writes,
    reach,
    require,
    write_products,
)
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import by_document
from resinspect.errors import OptionError

READ = ("token", "reader", "source")


def contribution_share(trace: xr.Dataset) -> xr.DataArray:
    """Signed share of each source in what a reader gets: ``<c_rs, h_r> / |h_r|^2``.

    Args:
        trace: With ``cross``, or with ``contribution`` where W is no scalar.

    Returns:
        ``(token, reader, source)``, no unit; sums to 1 over sources, may be negative or above 1. NaN beyond a reader's
        sources and where its input is zero. Null value ``1 / n`` for n equal orthogonal writes read alike.

    Raises:
        TraceError: If a variable is missing.
    """
    inner = contributions(trace)
    (norm,) = require(trace, "reader_norm")
    share = _over(inner, norm[:, :, None] ** 2)
    attrs = {"long_name": "contribution share", "units": "1", "formula": "<c_rs, h_r> / |h_r|^2"}
    return labelled(trace, np.where(reach(trace), share, np.nan), READ, "contribution_share", attrs)


def magnitude_share(trace: xr.Dataset) -> xr.DataArray:
    """Share of each source by length: ``|c_rs| / sum_s' |c_rs'|``, whatever the contributions' directions.

    Args:
        trace: Any.

    Returns:
        ``(token, reader, source)``, no unit, 0 to 1, sums to 1 over sources. NaN beyond a reader's sources and where
        all contributions are zero. Null value ``1 / n``.
    """
    size = contribution_norms(trace)
    share = _over(size, size.sum(-1, keepdims=True))
    attrs = {"long_name": "magnitude share", "units": "1", "formula": "|c_rs| / sum |c_rs'|"}
    return labelled(trace, np.where(reach(trace), share, np.nan), READ, "magnitude_share", attrs)


def effective_sources(
    trace: xr.Dataset, *, definition: Literal["participation", "entropy"] = "participation"
) -> xr.DataArray:
    """How many sources a reader effectively reads, from magnitude shares m.

    Args:
        trace: Any.
        definition: ``"participation"`` is ``1 / sum m^2``, ``"entropy"`` is ``exp(-sum m log m)``.

    Returns:
        ``(token, reader)``, in sources: 1 if one source is all, n for n equal ones (the null value).

    Raises:
        OptionError: If there is no such definition.
    """
    share = magnitude_share(trace).values
    if definition == "participation":
        number = 1 / np.where(reach(trace), share**2, 0.0).sum(-1)
        formula = "1 / sum m^2"
    elif definition == "entropy":
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        number = np.exp(-np.where(reach(trace), share * logs, 0.0).sum(-1))
        formula = "exp(-sum m log m)"
    else:
        raise OptionError(f"definition is {definition!r}; choose participation or entropy.")
    attrs = {"long_name": "effective number of sources", "units": "sources", "formula": formula}
    return labelled(trace, number, READ[:2], "effective_sources", attrs)


def dilution_index(trace: xr.Dataset) -> xr.DataArray:
    """How evenly readers spread over the sources they have: ``(N_eff - 1) / (n - 1)``, averaged over readers.

    Args:
        trace: Any.

    Returns:
        ``(token,)``, no unit, 0 (every reader has one source) to 1, the null value: what equal writes read alike give.
        Readers with a single source are left out.
    """
    number = effective_sources(trace).values
    available = reach(trace).sum(-1)
    spread = _over(number - 1, np.maximum(available - 1, 0)[None])
    known = ~np.isnan(spread)
    index = _over(np.where(known, spread, 0.0).sum(-1), known.sum(-1))
    attrs = {"long_name": "dilution index", "units": "1", "formula": "mean_r (N_eff - 1) / (n_r - 1)", "null": 1.0}
    return labelled(trace, index, ("token",), "dilution_index", attrs)


def write_persistence(trace: xr.Dataset) -> xr.DataArray:
    """Share of a write in later readers as a function of distance, averaged over all pairs at that distance.

    Args:
        trace: With what ``contribution_share`` needs.

    Returns:
        ``(token, distance)`` of contribution shares; distance 1 is the first reader after the write, counted in
        sources. The embedding is left out: it is no sublayer's write.
    """
    share, distance = contribution_share(trace).values, _distances(trace)
    steps = np.unique(distance[distance > 0])
    values = [np.nanmean(share[:, distance == step], axis=1) for step in steps]
    coords = {name: trace.coords[name] for name in trace.coords if trace.coords[name].dims == ("token",)}
    attrs = {"long_name": "share of a write in a reader at that distance", "units": "1"}
    return xr.DataArray(
        np.stack(values, axis=1) if values else np.empty((trace.sizes["token"], 0)),
        {**coords, "distance": ("distance", steps, {"long_name": "distance", "units": "sources"})},
        ("token", "distance"),
        "write_persistence",
        attrs,
    )


def persistence_fit(
    trace: xr.Dataset, *, drop_first: int = 0, resamples: int = 1000, level: float = 0.95, seed: int = 0
) -> pd.DataFrame:
    """Two numbers for how writes fade, each with a bootstrap interval over documents.

    ``half_life``: distance at which the mean share of a write has fallen to half of that at distance 1, by linear
    interpolation; infinite if it never does. ``exponent``: slope b of ``log |mean share| = a_s + b log n_r`` over
    sources s and readers r, n_r the number of sources a reader has: the essay's claim that each contribution is
    diluted to ``1 / T`` is b = -1, which equal orthogonal writes give; 0 is no dilution.

    Args:
        trace: With what ``contribution_share`` needs.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        Rows ``half_life`` and ``exponent`` with ``value``, ``low``, ``high``, ``null``, ``tokens``, ``documents``.
    """
    share, distance = contribution_share(trace).values, _distances(trace)
    kept = trace.coords["position"].values >= drop_first
    pairs = distance > 0
    sums, counts = by_document(share[kept][:, pairs], trace.coords["sample"].values[kept])
    steps, available = distance[pairs], np.broadcast_to(reach(trace).sum(-1)[:, None], pairs.shape)[pairs]
    source = np.broadcast_to(np.arange(pairs.shape[1]), pairs.shape)[pairs]
    picks = bootstrap(len(sums), resamples, seed)
    means = (picks @ sums) / np.maximum(picks @ counts, 1)
    found = {
        "half_life": (np.array([_half_life(row, steps) for row in means]), np.inf),
        "exponent": (_slopes(means, source, available), -1.0),
    }
    rows = []
    for name, (values, null) in found.items():
        low, high = percentiles(values, len(sums), level)
        rows.append((name, values[0], low, high, null, int(kept.sum()), len(sums)))
    return pd.DataFrame(rows, columns=["quantity", "value", "low", "high", "null", "tokens", "documents"])


def update_ratio(trace: xr.Dataset) -> xr.DataArray:
    """Length of a sublayer's write over that of what it read: ``|v_s| / |h_r|`` (Csordas et al. 2025, section 3).

    Args:
        trace: Any.

    Returns:
        ``(token, reader)`` over the readers that have a write of their own, no unit, non-negative. Large: the sublayer
        changes the residual much; NaN where its input is zero.
    """
    readers, sources = _own(trace)
    norm, written = require(trace, "reader_norm", "source_norm")
    attrs = {"long_name": "update ratio", "units": "1", "formula": "|v_s| / |h_r|"}
    ratio = _over(written[:, sources], norm[:, readers])
    return labelled(trace.isel(reader=readers), ratio, READ[:2], "update_ratio", attrs)


def write_alignment(trace: xr.Dataset) -> xr.DataArray:
    """Cosine of a sublayer's write and its input: below 0 it erases, above 0 it amplifies, 0 is new.

    Args:
        trace: With ``gram``, or ``write_cross`` where W is no scalar.

    Returns:
        ``(token, reader)`` over the readers that have a write of their own, -1 to 1 (Csordas et al. 2025, section 3).
    """
    readers, sources = _own(trace)
    norm, written = require(trace, "reader_norm", "source_norm")
    inner = write_products(trace)[:, sources, readers]
    attrs = {"long_name": "cosine of write and input", "units": "1", "formula": "<v_s, h_r> / (|v_s| |h_r|)"}
    cosine = _over(inner, written[:, sources] * norm[:, readers])
    return labelled(trace.isel(reader=readers), cosine, READ[:2], "write_alignment", attrs)


def _own(trace: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    pairs = own_writes(trace)
    return np.array([r for r, _ in pairs], dtype=int), np.array([s for _, s in pairs], dtype=int)


def _distances(trace: xr.Dataset) -> np.ndarray:
    """``(reader, source)``: 1 for a reader's newest source, rising into the past; 0 for none, and for the embedding."""
    newest = trace.coords["reader_prefix"].values[:, None]
    distance = np.where(reach(trace), newest - np.arange(trace.sizes["source"]), 0)
    return np.where(trace.coords["source_kind"].values == "embed", 0, distance)


def _half_life(share: np.ndarray, distance: np.ndarray) -> float:
    steps = np.unique(distance)
    curve = np.array([share[distance == step].mean() for step in steps])
    below = np.flatnonzero(curve <= curve[0] / 2)
    if curve[0] <= 0 or not below.size:
        return np.inf
    i = below[0]
    return float(np.interp(curve[0] / 2, [curve[i], curve[i - 1]], [steps[i], steps[i - 1]]))


def _slopes(share: np.ndarray, source: np.ndarray, available: np.ndarray) -> np.ndarray:
    """Slope of log share on log sources for each row, with an intercept for each source."""
    with np.errstate(divide="ignore"):
        y = np.log(np.abs(share))
    x = np.log(available)
    used = np.isfinite(y).all(0)
    dummies = (source[used, None] == np.unique(source[used])).astype(float)
    centre = dummies @ np.diag(1 / dummies.sum(0)) @ dummies.T if used.any() else np.zeros((0, 0))
    dx = x[used] - centre @ x[used]
    return (y[:, used] - y[:, used] @ centre) @ dx / (dx @ dx) if dx.any() else np.full(len(share), np.nan)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    top, bottom = np.broadcast_arrays(top, bottom)
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)
