"""What parallel residual streams do to routing: whether they cancel, and whether it matters that they are several.

A write v that enters stream s with weight ``post_s`` is later found in the streams with coefficients ``C_s``, and a
reader gets it with weight ``W = sum_s c_s``, ``c_s = pre_s C_s``. The coefficients are unrolled here from the natives,
per token; a reader whose ``sum_s c_s`` is not the trace's W (a readout per channel, for example) is NaN.
"""

from collections.abc import Iterator

import numpy as np
import xarray as xr

from resinspect.analysis.inputs import labelled, reach, require, weights
from resinspect.analysis.mixing import structure
from resinspect.errors import TraceError

READ = ("token", "reader", "source")
AGREES = 1e-4
"""W and the sum over streams may differ by this share of the largest coefficient: by the rounding of stored natives."""


def stream_coefficients(trace: xr.Dataset) -> xr.DataArray:
    """Weight of each source in what a reader takes from each stream: ``c_s = pre_s C_s``, ``sum_s c_s = W``.

    As in arXiv 2409.19606, equation 27, before the sum over streams. As large as W times the number of streams.

    Args:
        trace: With the natives ``pre``, ``post`` and, unless streams never mix, ``mix``.

    Returns:
        ``(token, reader, stream, source)``, no unit, any sign; NaN beyond a reader's sources.
        Null value ``W / n`` for n streams that are read and written alike.

    Raises:
        TraceError: If the trace holds no such natives, or they give W at no reader.
    """
    streams = require(trace, "native_pre")[0].shape[-1]
    sizes = trace.sizes
    values = np.full((sizes["token"], sizes["reader"], streams, sizes["source"]), np.nan)
    for reader, found, _ in _coefficients(trace):
        values[:, reader, :, : found.shape[-1]] = found
    attrs = {"long_name": "routing weight through each stream", "units": "1", "formula": "pre_s C_s"}
    return labelled(trace, values, ("token", "reader", "stream", "source"), "stream_coefficients", attrs)


def cancellation_index(trace: xr.Dataset) -> xr.DataArray:
    """How much of a source the streams take away from each other: ``1 - |sum_s c_s| / sum_s |c_s|``.

    Args:
        trace: As for ``stream_coefficients``.

    Returns:
        ``(token, reader, source)``, no unit, 0 (all streams with the same sign, the null value) to 1 (they cancel). NaN
        beyond a reader's sources and where all coefficients are zero.
        Source: own definition.

    Raises:
        TraceError: As ``stream_coefficients``.
    """
    values = np.full(tuple(trace.sizes[dim] for dim in READ), np.nan)
    for reader, found, _ in _coefficients(trace):
        paths = np.abs(found).sum(1)
        kept = np.divide(np.abs(found.sum(1)), paths, out=np.full(paths.shape, np.nan), where=paths > 0)
        values[:, reader, : found.shape[-1]] = np.maximum(1 - kept, 0)
    never = "no weight of this scheme is below 0, so nothing can cancel: 0 by construction"
    attrs = {
        "long_name": "cancellation between streams",
        "units": "1",
        "formula": "1 - |sum_s c_s| / sum_s |c_s|",
        "guaranteed": never if "nonnegative" in structure(trace) else "",
        "null": 0.0,
    }
    return labelled(trace, values, READ, "cancellation_index", attrs)


def stream_specific_routing(trace: xr.Dataset) -> xr.DataArray:
    """What W has beyond routing through one blurred stream: ``W_ri - (sum_s pre_rs) (sum_s post_is) / n``.

    Streams that mix long enough hold the same, and reading them is then of rank 1; what is left shows that a reader
    finds a write in the streams where it was put. For the embedding, which starts in every stream, post is 1.

    Args:
        trace: As for ``stream_coefficients``.

    Returns:
        ``(token, reader, source)``, no unit; null value 0: n streams act as one gated residual. NaN beyond a reader's
        sources.
        Source: own definition.

    Raises:
        TraceError: As ``stream_coefficients``.
    """
    rest, _ = _beyond_rank_one(trace)
    whole = "rows of M sum to 1, so every stream holds the embedding once: its entry is 0 by construction"
    attrs = {
        "long_name": "stream-specific routing",
        "units": "1",
        "formula": "W_ri - (sum_s pre_rs) (sum_s post_is) / n",
        "guaranteed": whole if "rows" in structure(trace) else "",
        "null": 0.0,
    }
    return labelled(trace, rest, READ, "stream_specific_routing", attrs)


def stream_specificity(trace: xr.Dataset) -> xr.DataArray:
    """Size of ``stream_specific_routing`` over that of W: ``|W_r - rank one| / |W_r|`` over the writes of sublayers.

    The embedding is left out: where rows of the mixing sum to 1 its part is 0 by construction.

    Args:
        trace: As for ``stream_coefficients``.

    Returns:
        ``(token, reader)``, no unit, non-negative; null value 0. NaN at the first reader, which has no write to read,
        and where all weights are zero.
        Source: own definition.

    Raises:
        TraceError: As ``stream_coefficients``.
    """
    rest, weight = _beyond_rank_one(trace)
    writes = np.where(reach(trace), 1.0, 0.0) * (trace.coords["source_kind"].values != "embed")
    unknown = np.isnan(rest) & (writes > 0)
    above, below = (np.sqrt((np.nan_to_num(x) ** 2 * writes).sum(-1)) for x in (rest, weight))
    values = np.divide(above, below, out=np.full(above.shape, np.nan), where=(below > 0) & ~unknown.any(-1))
    attrs = {
        "long_name": "stream specificity",
        "units": "1",
        "formula": "|W_r - (sum pre_r) (sum post) / n| / |W_r| over writes",
        "guaranteed": "",
        "null": 0.0,
    }
    return labelled(trace, values, READ[:2], "stream_specificity", attrs)


def _beyond_rank_one(trace: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """W less its rank-1 form, and W."""
    weight = weights(trace)
    rest, post = np.full(weight.shape, np.nan), _post(trace).sum(-1)
    for reader, found, pre in _coefficients(trace):
        prefix = found.shape[-1]
        one = pre.sum(-1)[:, None] * post[:, :prefix] / pre.shape[-1]
        rest[:, reader, :prefix] = weight[:, reader, :prefix] - one
    return rest, weight


def _coefficients(trace: xr.Dataset) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each reader that the streams explain: its coefficients ``(token, stream, source)`` and its weights of streams.

    Raises:
        TraceError: If there is none.
    """
    weight, explained = weights(trace), 0
    for reader, state, pre in _unrolled(trace):
        found = pre[..., None] * state
        known = weight[:, reader, : found.shape[-1]]
        size = np.nanmax(np.abs(found), initial=0.0)
        if not (np.isfinite(known) & ~(np.abs(found.sum(1) - known) <= AGREES * size)).any():
            explained += 1
            yield reader, found, pre
    if not explained:
        raise TraceError(
            f"the streams of scheme {trace.attrs['scheme']!r} do not give its W by pre, mix and post alone, so there "
            "are no coefficients per stream to measure."
        )


def _unrolled(trace: xr.Dataset) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each reader, what the streams hold of every source then, ``(token, stream, source)``, and how it reads them."""
    reads: dict[int, list[tuple[int, np.ndarray]]] = {}
    for reader, pre in _reads(trace):
        reads.setdefault(_site_of(trace, reader), []).append((reader, pre))
    post, mix = _post(trace), _mix(trace)
    prefix = trace.coords["reader_prefix"].values
    state = post[:, :0].swapaxes(1, 2)
    for site in sorted(reads):
        size = int(prefix[reads[site][0][0]])
        written = post[:, state.shape[-1] : size].swapaxes(1, 2)
        state = np.concatenate([state, written], axis=-1)
        for reader, pre in reads[site]:
            yield reader, state, pre
        if mix is not None and site < mix.shape[1]:
            state = mix[:, site] @ state


def _reads(trace: xr.Dataset) -> Iterator[tuple[int, np.ndarray]]:
    """Each reader's weights of the streams, ``(token, stream)``; a readout without natives sums or averages them."""
    (pre,) = require(trace, "native_pre")
    kinds = trace.coords["reader_kind"].values
    by_view = "view" in trace["native_pre"].dims
    seen: dict[int, int] = {}
    for reader, kind in enumerate(kinds):
        site = _site_of(trace, reader)
        view = seen.get(site, 0)
        seen[site] = view + 1
        values = pre[:, site, view] if by_view else pre[:, site]
        if kind == "final" and np.isnan(values).all():
            values = np.full(values.shape, _readout_share(trace, reader, values.shape[-1]))
        yield reader, values


def _readout_share(trace: xr.Dataset, reader: int, streams: int) -> float:
    """1 where the last reader sums the streams, 1 / n where it averages them: what the newest write's weight says."""
    newest = int(trace.coords["reader_prefix"].values[reader]) - 1
    weight, post = weights(trace)[:, reader, newest], _post(trace)[:, newest].sum(-1)
    summed, averaged = (np.abs(weight - share * post).sum() for share in (1.0, 1 / streams))
    return 1.0 if summed <= averaged else 1 / streams


def _site_of(trace: xr.Dataset, reader: int) -> int:
    name = str(trace.coords["reader"].values[reader])
    sites = [str(site) for site in trace.coords["site"].values]
    return next((i for i, site in enumerate(sites) if name == site or name.startswith(f"{site}.")), -1)


def _post(trace: xr.Dataset) -> np.ndarray:
    """How each source enters the streams: ``(token, source, stream)``; the embedding once into each."""
    (post,) = require(trace, "native_post")
    sites = [str(site) for site in trace.coords["site"].values]
    entered = np.ones((len(post), trace.sizes["source"], post.shape[-1]))
    for i, (name, kind) in enumerate(
        zip(trace.coords["source"].values, trace.coords["source_kind"].values, strict=True)
    ):
        if kind != "embed":
            entered[:, i] = post[:, sites.index(name)] if name in sites else np.nan
    return entered


def _mix(trace: xr.Dataset) -> np.ndarray | None:
    """Mixing at each site, the identity where a site has none; None where streams never mix."""
    if "native_mix" not in trace and "unmixed" in structure(trace):
        return None
    (mix,) = require(trace, "native_mix")
    missing = np.isnan(mix).all((0, 2, 3))
    mix[:, missing] = np.eye(mix.shape[-1])
    return mix
