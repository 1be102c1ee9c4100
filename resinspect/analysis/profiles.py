"""Profiles: how a reader's reading is spread over sources, and a source's readership over readers; one per token."""

from typing import Literal

import numpy as np
import xarray as xr

from resinspect.analysis.dilution import contribution_share, magnitude_share
from resinspect.analysis.inputs import labelled, reach, weights
from resinspect.errors import OptionError

Share = Literal["magnitude", "weight", "contribution"]
Over = Literal["source", "distance"]
READ = ("token", "reader")


def reading_profile(trace: xr.Dataset, *, share: Share = "magnitude", over: Over = "source") -> xr.DataArray:
    """How a reader's reading is spread over its sources.

    Args:
        trace: With what the share needs.
        share: ``"magnitude"`` is ``|c_rs| / sum |c_rs'|``, ``"weight"`` is ``|W_rs| / sum |W_rs'|``,
            ``"contribution"`` is ``<c_rs, h_r> / |h_r|^2``, which is signed.
        over: ``"source"``, or ``"distance"`` in sources, 1 the newest; the embedding keeps its distance.

    Returns:
        ``(token, reader, source)`` or ``(token, reader, distance)``, no unit, sums to 1; NaN beyond a reader's sources
        and where a weight is unknown. Null value ``1 / n`` for n sources read alike. With a plain residual the weight
        share is ``1 / n`` by construction.
        Source: own definition.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share or dimension.
    """
    values = np.where(reach(trace), shares(trace, share), np.nan)
    attrs = {"long_name": f"reading profile ({share} share)", "units": "1", "share": share, "null": "1 / n"}
    if _over(over) == "source":
        return labelled(trace, values, (*READ, "source"), "reading_profile", attrs)
    return _along_distance(trace, values, "reader", attrs)


def readership(trace: xr.Dataset, *, share: Share = "magnitude", over: Over = "source") -> xr.DataArray:
    """Where a write is read: its shares in all readers, scaled to sum to 1 over them.

    Args:
        trace: With what the share needs.
        share: ``"magnitude"`` or ``"weight"``, as in ``reading_profile``.
        over: ``"source"`` keeps the readers themselves; ``"distance"`` adds up readers at the same distance in sources,
            1 for those at which the write is the newest.

    Returns:
        ``(token, source, reader)`` or ``(token, source, distance)``, no unit, 0 to 1; NaN where a reader cannot read
        the source, and for a write that nobody reads. Null value ``1 / n`` for n readers.
        Source: own definition.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share or dimension, or the share is signed.
    """
    values = unsigned(trace, share)
    total = values.sum(1, keepdims=True)
    values = np.divide(values, total, out=np.full(values.shape, np.nan), where=reach(trace) & (total != 0))
    attrs = {"long_name": f"readership ({share} share)", "units": "1", "share": share, "null": "1 / n"}
    if _over(over) == "source":
        dims = ("token", "source", "reader")
        return labelled(trace, values.swapaxes(1, 2), dims, "readership", attrs)
    return _along_distance(trace, values.swapaxes(1, 2), "source", attrs)


def locality(trace: xr.Dataset, *, newest: int = 1, share: Share = "magnitude") -> xr.DataArray:
    """Share of a reader's newest sources: 1 is a chain of sublayers, each reading only the last.

    Args:
        trace: With what the share needs.
        newest: How many sources count as newest.
        share: As in ``reading_profile``.

    Returns:
        ``(token, reader)``, no unit, 0 to 1 (a signed share may leave that range). NaN for readers with no other
        sources. Null value ``newest / n``, as coordinate ``null`` on readers.
        Source: own definition.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share, or ``newest`` is below 1.
    """
    if newest < 1:
        raise OptionError(f"newest is {newest}; at least 1 source must count as newest.")
    chosen = (distances(trace) >= 1) & (distances(trace) <= newest)
    return _part(trace, chosen, share, "locality", f"share of the newest {newest} sources")


def embedding_share(trace: xr.Dataset, *, share: Share = "magnitude") -> xr.DataArray:
    """Share of the embedding in what a reader reads.

    Args:
        trace: With what the share needs.
        share: As in ``reading_profile``.

    Returns:
        ``(token, reader)``, no unit, 0 to 1 (a signed share may leave that range). NaN for readers with no other
        sources. Null value ``1 / n``, as coordinate ``null`` on readers. Multi-stream schemes with row-stochastic
        mixing keep the embedding's coefficient at 1 in every stream by construction.
        Source: own definition.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share.
    """
    chosen = embeddings(trace) & reach(trace)
    return _part(trace, chosen, share, "embedding_share", "share of the embedding")


def expected_lag(trace: xr.Dataset, *, share: Share = "magnitude") -> xr.DataArray:
    """Mean distance of what a reader reads: ``sum_s p_rs (n_r - s)``.

    Args:
        trace: With what the share needs.
        share: ``"magnitude"`` or ``"weight"``, as in ``reading_profile``.

    Returns:
        ``(token, reader)``, in sources, 1 (only the newest) to n (only the embedding). NaN for readers with one source.
        Null value ``(n + 1) / 2``, as coordinate ``null`` on readers.
        Source: own definition.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share, or it is signed.
    """
    count = trace.coords["reader_prefix"].values
    lag = np.where(count > 1, (unsigned(trace, share) * distances(trace)).sum(-1), np.nan)
    attrs = {"long_name": "expected lag", "units": "sources", "share": share, "formula": "sum_s p_rs (n_r - s)"}
    return labelled(trace, lag, READ, "expected_lag", attrs).assign_coords(null=("reader", (count + 1) / 2))


def profile_entropy(trace: xr.Dataset, *, share: Share = "magnitude") -> xr.DataArray:
    """Evenness of a reader's profile: ``-sum_s p_rs log p_rs / log n_r``.

    Args:
        trace: With what the share needs.
        share: ``"magnitude"`` or ``"weight"``, as in ``reading_profile``.

    Returns:
        ``(token, reader)``, no unit, 0 (one source is all) to 1, the null value: all sources alike. NaN for readers
        with one source.
        Source: evenness of Pielou 1966.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share, or it is signed.
    """
    values, count = unsigned(trace, share), trace.coords["reader_prefix"].values
    logs = np.log(values, out=np.zeros_like(values), where=values > 0)
    scale = np.where(count > 1, np.log(np.maximum(count, 2)), np.nan)
    attrs = {"long_name": "evenness of the profile", "units": "1", "share": share, "null": 1.0}
    attrs["formula"] = "-sum_s p_rs log p_rs / log n_r"
    return labelled(trace, -(values * logs).sum(-1) / scale, READ, "profile_entropy", attrs)


def shares(trace: xr.Dataset, share: Share) -> np.ndarray:
    """Shares ``(token, reader, source)``: 0 where a source cannot be read, NaN where unknown."""
    if share == "weight":
        size = np.abs(weights(trace))
        total = size.sum(-1, keepdims=True)
        values = np.divide(size, total, out=np.full_like(size, np.nan), where=total != 0)
    elif share == "magnitude":
        values = magnitude_share(trace).values
    elif share == "contribution":
        values = contribution_share(trace).values
    else:
        raise OptionError(f"share is {share!r}; choose magnitude, weight or contribution.")
    return np.where(reach(trace), values, 0.0)


def unsigned(trace: xr.Dataset, share: Share) -> np.ndarray:
    """Shares that are a distribution over sources."""
    if share == "contribution":
        raise OptionError("a contribution share has a sign and is no distribution; choose magnitude or weight.")
    return shares(trace, share)


def distances(trace: xr.Dataset) -> np.ndarray:
    """``(reader, source)``: 1 for a reader's newest source, rising into the past; 0 for sources it cannot read."""
    newest = trace.coords["reader_prefix"].values[:, None]
    return np.where(reach(trace), newest - np.arange(trace.sizes["source"]), 0)


def embeddings(trace: xr.Dataset) -> np.ndarray:
    """Which sources are the embedding: bool ``(source,)``."""
    return trace.coords["source_kind"].values == "embed"


def overlap(count: int, bins: int) -> np.ndarray:
    """Part of each of so many equal pieces of a line that lies in each bin: ``(piece, bin)``, rows sum to 1."""
    piece, edge = np.arange(count)[:, None] / count, np.arange(bins) / bins
    inside = np.minimum(piece + 1 / count, edge + 1 / bins) - np.maximum(piece, edge)
    return np.maximum(inside, 0) * count


def _over(over: str) -> str:
    if over not in ("source", "distance"):
        raise OptionError(f"over is {over!r}; choose source or distance.")
    return over


def _part(trace: xr.Dataset, chosen: np.ndarray, share: Share, name: str, long_name: str) -> xr.DataArray:
    """Share of the chosen ``(reader, source)``, NaN where they are all that a reader has."""
    total, part = reach(trace).sum(-1), chosen.sum(-1)
    values = np.where(part < total, np.einsum("trs,rs->tr", shares(trace, share), chosen.astype(float)), np.nan)
    attrs = {"long_name": long_name, "units": "1", "share": share}
    return labelled(trace, values, READ, name, attrs).assign_coords(null=("reader", part / total))


def _along_distance(trace: xr.Dataset, values: np.ndarray, dim: str, attrs: dict[str, str]) -> xr.DataArray:
    """Put ``(token, dim, other)`` on distances, adding up what lies at the same one; NaN where there is nothing."""
    distance = distances(trace) if dim == "reader" else distances(trace).T
    steps = np.arange(1, distance.max() + 1)
    result = np.full((*values.shape[:2], len(steps)), np.nan)
    for i, row in enumerate(distance):
        there = np.unique(row[row > 0])
        result[:, i, there - 1] = values[:, i, row > 0] @ (row[row > 0, None] == there)
    array = labelled(trace, result, ("token", dim, "distance"), "reading_profile", attrs)
    array.name = "reading_profile" if dim == "reader" else "readership"
    return array.assign_coords(distance=("distance", steps, {"long_name": "distance", "units": "sources"}))
