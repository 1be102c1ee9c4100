"""Geometry over depth: lengths of inputs and writes, angles between readers, and what a write adds that is new."""

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import contribution_norms, labelled, reader_products, require
from resinspect.analysis.summary import LEVEL, RESAMPLES, summarise
from resinspect.errors import TraceError

# Tokens at a time where a measure changes a matrix per token in place: small enough to stay in cache.
_CHUNK = 512
# A cosine whose rounding error may exceed this is not given.
_RESOLVED = 1e-2


def residual_norms(
    trace: xr.Dataset, *, drop_first: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> pd.DataFrame:
    """Lengths of reader inputs ``|h_r|`` and of writes ``|v_s|`` by depth.

    Args:
        trace: Any.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        One row per reader and per source: ``quantity`` (``reader`` or ``write``), ``name``, ``kind``, ``layer``,
        ``depth`` (reading steps: 1 for the first reader, and a write is as deep as the reader it followed; 0 for the
        embedding), ``mean``, ``median``, ``low``, ``high``, ``tokens``, ``documents``. In activations, non-negative.
        Squares divided by the hidden size are the second moment per channel: the variance of Sun et al. 2025 (The
        Curse of Depth) where the channel mean is zero. Null value for readers: the square root of the number of
        sources, times the length of a write, for equal orthogonal writes read with weight 1.
    """
    frames = []
    for quantity, dim, depth in (("reader", "reader", _reader_depth(trace)), ("write", "source", _source_depth(trace))):
        (norm,) = require(trace, f"{dim}_norm")
        values = labelled(trace, norm, ("token", dim), f"{dim}_norm", {"long_name": "norm", "units": "activation"})
        table = summarise(values, drop_first=drop_first, resamples=resamples, level=level, seed=seed)
        numbers = table.drop(columns=dim)
        labels = {"name": table[dim], "kind": trace.coords[f"{dim}_kind"], "layer": trace.coords[f"{dim}_layer"]}
        frames.append(pd.concat([pd.DataFrame({"quantity": quantity, **labels, "depth": depth}), numbers], axis=1))
    return pd.concat(frames, ignore_index=True)


def norm_growth(
    trace: xr.Dataset, *, drop_first: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> pd.DataFrame:
    """How fast norms grow with depth: least-squares slope of ``log |h_r|`` (and ``log |v_s|``), one per token.

    The Curse of Depth (Sun et al. 2025, 2502.05795) bounds the variance of a pre-norm residual between growth linear in
    depth (slope of the log norm on log depth 1/2, half of that of the variance) and exponential growth (straight on
    depth itself): ``r2`` says which line fits the token mean better. The embedding's own norm (depth 0) is left out of
    the fit to the writes.

    ``|h_r|`` is the length of what a reader gets, before its own norm: in a plain residual that of the residual stream.
    Softmax depth attention reads a convex mix, which is never longer than its longest write (in block form: than the
    longest sum of a block's writes), so no growth is no finding there; its writes may grow all the same. Readers of
    hyper-connections get streams weighted by ``pre``: their slope mixes growth of the streams with how ``pre`` changes
    over depth.

    Args:
        trace: Any.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        Rows ``quantity`` (``reader``, ``write``) by ``axis`` (``log depth``, ``depth``) with ``slope``, ``median``,
        ``low``, ``high``, ``null`` (equal orthogonal writes read with weight 1), ``r2``, ``tokens``, ``documents``.
        Tokens with a norm of zero are left out.
    """
    sized = np.log(np.sqrt(trace.coords["reader_prefix"].values))
    depths = {"reader": (_reader_depth(trace), sized), "write": (_source_depth(trace), np.zeros(trace.sizes["source"]))}
    slopes, rows = [], []
    for quantity, (depth, expected) in depths.items():
        (norm,) = require(trace, "reader_norm" if quantity == "reader" else "source_norm")
        logs = np.log(norm, out=np.full(norm.shape, np.nan), where=norm > 0)[:, depth > 0]
        for axis, x in {"log depth": np.log(depth[depth > 0]), "depth": depth[depth > 0].astype(float)}.items():
            weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum() if np.ptp(x) > 0 else np.full(len(x), np.nan)
            slopes.append(logs @ weight)
            kept = ~np.isnan(slopes[-1]) & (trace.coords["position"].values >= drop_first)
            rows.append((quantity, axis, expected[depth > 0] @ weight, _explained(logs[kept], x)))
    attrs = {"long_name": "slope of the log norm over depth", "units": "1"}
    values = xr.DataArray(
        np.stack(slopes, axis=1),
        labelled(trace, slopes[0], ("token",), "", attrs).coords,
        ("token", "row"),
        "norm_growth",
        attrs,
    )
    table = summarise(values, drop_first=drop_first, resamples=resamples, level=level, seed=seed)
    labels = pd.DataFrame(rows, columns=["quantity", "axis", "null", "r2"])
    table = pd.concat([labels, table.drop(columns="row").rename(columns={"mean": "slope"})], axis=1)
    return table[["quantity", "axis", "slope", "median", "low", "high", "null", "r2", "tokens", "documents"]]


def novelty(trace: xr.Dataset) -> xr.DataArray:
    """Part of a write that no earlier write has: ``|v_s - P v_s| / |v_s|``, P the projection on the span of all before.

    From the pivots of the Cholesky factorisation of the Gram matrix of unit writes.

    Args:
        trace: With ``gram``.

    Returns:
        ``(token, source)``, no unit, 0 (a combination of earlier writes) to 1 (orthogonal to all); 1 for the first
        source, which says nothing; NaN for a write of zero. Null value ``sqrt(1 - s / hidden_size)`` for source s of
        independent random writes: more sources than channels makes it 0. ``attrs["floor"]``: what rounding of the
        Gram matrix leaves of a dependent write; smaller values are given as 0, and where earlier writes are nearly
        dependent themselves values somewhat above it are rounding too.
        Source: own definition, the rest of Gram-Schmidt.

    Raises:
        TraceError: If ``gram`` is missing.
    """
    (gram,) = require(trace, "gram")
    count = gram.shape[-1]
    # An inner product of unit vectors is off by a few roundings, a pivot by one for every earlier write.
    floor = np.sqrt(4 * count * np.finfo(trace["gram"].dtype).eps)
    values = np.empty(gram.shape[:2])
    for start in range(0, len(gram), _CHUNK):
        values[start : start + _CHUNK] = _pivots(gram[start : start + _CHUNK], floor)
    attrs = {
        "long_name": "novelty of the write",
        "units": "1",
        "formula": "|v_s - P v_s| / |v_s|",
        "floor": float(floor),
        "null": "sqrt(1 - s / hidden_size)",
    }
    return labelled(trace, values, ("token", "source"), "novelty", attrs)


def reader_cosine(trace: xr.Dataset) -> xr.DataArray:
    """Cosine of the inputs of two readers: ``<h_r, h_r'> / (|h_r| |h_r'|)``.

    Args:
        trace: With ``gram``, or ``reader_gram`` where W is no scalar.

    Returns:
        ``(token, reader, reader2)``, -1 to 1. NaN where an input is zero, and where writes cancel so much that the
        stored Gram matrix does not resolve the cosine to 0.01. Null value ``sqrt(n / n')`` for readers of n < n' equal
        orthogonal writes with weight 1: high cosines between neighbours are what summing gives.
        Source: cosine similarity, from which the angles of Gromov et al. 2024 follow.

    Raises:
        TraceError: If a variable is missing.
    """
    attrs = {"long_name": "cosine of reader inputs", "units": "1", "formula": "<h_r, h_r'> / (|h_r| |h_r'|)"}
    return _by_two_readers(trace, _cosines(trace), "reader_cosine", {**attrs, "null": "sqrt(n / n')"})


def angular_distance(trace: xr.Dataset) -> xr.DataArray:
    """Angle between the inputs of two readers over pi: ``arccos(cos(h_r, h_r')) / pi``.

    Gromov et al. 2024 (2403.17887), who take layer inputs at the last token of each prompt; this is every token.

    Args:
        trace: With what ``reader_cosine`` needs.

    Returns:
        ``(token, reader, reader2)``, no unit: 0 same direction, 0.5 orthogonal, 1 opposite; float32 inner products
        resolve angles near 0 to about 4e-4. NaN as in ``reader_cosine``. Null value ``arccos(sqrt(n / n')) / pi``.

    Raises:
        TraceError: If a variable is missing.
    """
    angle = np.arccos(_cosines(trace)) / np.pi
    attrs = {"long_name": "angular distance of reader inputs", "units": "1", "formula": "arccos(cos(h_r, h_r')) / pi"}
    return _by_two_readers(trace, angle, "angular_distance", {**attrs, "null": "arccos(sqrt(n / n')) / pi"})


def block_influence(trace: xr.Dataset) -> xr.DataArray:
    """How much a layer turns the residual: ``1 - cos`` of its first reader's input and the next layer's.

    Men et al. 2024 (ShortGPT, 2403.03853) compare a layer's input and output. Where readers form their own inputs that
    is what the next layer reads; the last layer is held against the final readout. Of a sublayer with several inputs
    the first counts.

    Args:
        trace: With what ``reader_cosine`` needs.

    Returns:
        ``(token, reader)`` over the first reader of each layer, 0 (direction unchanged) to 2. Null value
        ``1 - sqrt(n / n')`` for readers of n < n' equal orthogonal writes with weight 1, given as coordinate ``null``.

    Raises:
        TraceError: If a variable is missing, or no layer is followed by another or by the final readout.
    """
    names = trace.coords["reader"].values.tolist()
    # The place before the dot tells passes of a looped layer apart: 3@1.attn.
    places = [name.partition(".")[0] for name in names]
    first = [i for i, place in enumerate(places) if place not in places[:i]]
    if len(first) < 2:
        raise TraceError("block influence compares readers of consecutive layers; this trace has readers of one only.")
    here, following = np.array(first[:-1]), np.array(first[1:])
    size = trace.coords["reader_prefix"].values
    attrs = {"long_name": "block influence", "units": "1", "formula": "1 - cos(h_l, h_(l+1))"}
    values = 1 - _cosines(trace)[:, here, following]
    chosen = trace.isel(reader=here)
    result = labelled(chosen, values, ("token", "reader"), "block_influence", attrs)
    return result.assign_coords(null=("reader", 1 - np.sqrt(size[here] / size[following])))


def _reader_depth(trace: xr.Dataset) -> np.ndarray:
    """1 for the first reader, one more for every later point in execution at which something reads."""
    return np.unique(trace.coords["reader_prefix"].values, return_inverse=True)[1] + 1


def _source_depth(trace: xr.Dataset) -> np.ndarray:
    """How many such points came before the write."""
    steps = np.unique(trace.coords["reader_prefix"].values)
    return np.searchsorted(steps, np.arange(trace.sizes["source"]), side="right")


def _explained(logs: np.ndarray, x: np.ndarray) -> float:
    """R^2 of the straight line through the mean over tokens."""
    if not len(logs) or np.ptp(x) == 0 or np.ptp(logs.mean(0)) == 0:
        return np.nan
    return float(np.corrcoef(logs.mean(0), x)[0, 1] ** 2)


def _pivots(gram: np.ndarray, floor: float) -> np.ndarray:
    norm = np.sqrt(np.einsum("tss->ts", gram))
    scale = np.divide(1.0, norm, out=np.zeros_like(norm), where=norm != 0)
    rest = gram * scale[:, :, None] * scale[:, None, :]
    left = np.empty_like(norm)
    for s in range(norm.shape[1]):
        pivot = rest[:, s, s]
        # A dependent write spans nothing new: what is left of it is rounding, and later writes are not held against it.
        spans = ~(pivot <= floor**2)
        left[:, s] = np.where(norm[:, s] == 0, np.nan, np.sqrt(np.where(spans, np.minimum(pivot, 1), 0)))
        below = rest[:, s + 1 :, s]
        inverse = np.divide(1.0, pivot, out=np.zeros_like(pivot), where=spans)
        rest[:, s + 1 :, s + 1 :] -= below[:, :, None] * (below * inverse[:, None])[:, None, :]
    return left


def _cosines(trace: xr.Dataset) -> np.ndarray:
    products = reader_products(trace)
    (norm,) = require(trace, "reader_norm")
    scale = np.divide(1.0, norm, out=np.full_like(norm, np.nan), where=norm > 0)
    cosine = np.clip(products * scale[:, :, None] * scale[:, None, :], -1, 1)
    if "reader_gram" not in trace:
        rounding = np.sqrt(np.finfo(trace["gram"].dtype).eps) * contribution_norms(trace).sum(-1) * scale
        cosine[rounding[:, :, None] * rounding[:, None, :] > _RESOLVED] = np.nan
    return cosine


def _by_two_readers(trace: xr.Dataset, values: np.ndarray, name: str, attrs: dict[str, str]) -> xr.DataArray:
    result = labelled(trace, values, ("token", "reader", "reader2"), name, attrs)
    return result.assign_coords(reader2=("reader2", trace.coords["reader"].values))
