"""The matrices that mix parallel residual streams, of one sublayer or of many in a row.

A scheme of n streams reads ``h = sum_s pre_s X_s`` and goes on with ``X' = M X + post v``, M being n x n. Everything is
per token: a composite is the product of one token's own matrices, and averages come after (arXiv 2512.24880 averages
over the tokens of a sequence first). What an architecture fixes is no finding: the attribute ``guaranteed`` of each
measure says so, and is empty where the value was free.
"""

from typing import Literal

import numpy as np
import xarray as xr

from resinspect.analysis.inputs import labelled, require
from resinspect.errors import OptionError, TraceError

Span = Literal["single", "from_start", "to_end"]
SPANS = {
    "single": "M_k",
    "from_start": "M_k ... M_1",
    "to_end": "M_K ... M_k",
}
"""The matrix of a sublayer alone; of all up to it, how the streams it leaves hold the first ones; of all from it on."""

STRUCTURE: dict[tuple[str, str], frozenset[str]] = {
    ("reference", "mhc"): frozenset({"rows", "sinkhorn", "nonnegative"}),
    ("deepseek_v4", "mhc"): frozenset({"rows", "sinkhorn", "nonnegative"}),
    ("glm5_next", "mhc"): frozenset({"rows", "sinkhorn", "nonnegative"}),
    ("hyper_connections_modules", "mhc"): frozenset({"columns", "sinkhorn", "nonnegative"}),
    ("hy_v4", "ihc"): frozenset({"rows", "columns", "unmixed", "nonnegative"}),
}
"""What (family, scheme) fixes: sums of 1, M = 1, no weight below 0; Sinkhorn's other sums are only nearly 1."""

FIXED = {
    "rows": "rows of M sum to 1 by construction",
    "columns": "columns of M sum to 1 by construction",
    "unmixed": "streams are never mixed: M is the identity by construction",
}
DIMS = ("token", "site", "stream", "stream2")


def structure(trace: xr.Dataset) -> frozenset[str]:
    """What the architecture of a trace fixes about its streams, as in ``STRUCTURE``."""
    return STRUCTURE.get((trace.attrs.get("family", ""), trace.attrs.get("scheme", "")), frozenset())


def stream_mixing(trace: xr.Dataset, *, span: Span = "single") -> xr.DataArray:
    """Mixing matrices ``M[stream, stream2]`` of the streams, ``X' = M X``.

    For AltUp (Gemma 3n) the matrix is the prediction ``1 + P``, single only: its correction mixes streams through the
    sublayers' own outputs.

    Args:
        trace: With the natives of a scheme of several streams.
        span: ``"single"``, or a product per token: ``"from_start"`` ``M_k ... M_1``, ``"to_end"`` ``M_K ... M_k``.

    Returns:
        ``(token, site, stream, stream2)`` over the sublayers that mix, no unit.

    Raises:
        TraceError: If the trace holds no such natives, or they give no composite.
        OptionError: If there is no such span.
    """
    if span not in SPANS:
        raise OptionError(f"span is {span!r}; choose one of {', '.join(SPANS)}.")
    single, sites = _single(trace)
    if span != "single" and "native_predict" in trace:
        raise TraceError(
            "AltUp has no composite mixing: between two predictions its correction mixes streams through the "
            'sublayers\' outputs; use span="single".'
        )
    attrs = {
        "long_name": "mixing of streams",
        "units": "1",
        "formula": SPANS[span],
        "guaranteed": fixed(trace, "unmixed"),
    }
    return labelled(trace.isel(site=sites), _product(single, span), DIMS, "stream_mixing", attrs)


def _single(trace: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """``(token, site, n, n)`` of the sublayers that mix, and which sites these are."""
    if "native_mix" not in trace and "native_predict" in trace:
        values, sites = _known(require(trace, "native_predict")[0])
        return values + np.eye(values.shape[-1]), sites
    if "native_mix" not in trace and "unmixed" in structure(trace):
        post, sites = _known(require(trace, "native_post")[0])
        return np.broadcast_to(np.eye(post.shape[-1]), (*post.shape, post.shape[-1])), sites
    return _known(require(trace, "native_mix")[0])


def _known(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sites of a native that has values there at all."""
    sites = np.flatnonzero(~np.isnan(values).all((0, *range(2, values.ndim))))
    return values[:, sites], sites


def _product(single: np.ndarray, span: str) -> np.ndarray:
    if span == "single":
        return single
    total, count = np.empty_like(single), single.shape[1]
    order = range(count) if span == "from_start" else range(count - 1, -1, -1)
    state = np.eye(single.shape[-1])
    for k in order:
        state = single[:, k] @ state if span == "from_start" else state @ single[:, k]
        total[:, k] = state
    return total


def fixed(trace: xr.Dataset, what: str) -> str:
    """What the architecture says about sums of rows or columns, or about the whole matrix; empty if nothing."""
    found = structure(trace)
    return next((FIXED[name] for name in ("unmixed", what) if name in found and name in FIXED), "")


def blurs(trace: xr.Dataset, span: str) -> str:
    """What becomes of a long product by construction; empty if nothing."""
    if span == "single" or "sinkhorn" not in structure(trace):
        return ""
    return "products of (nearly) doubly stochastic matrices tend to the uniform one; only the pace was free"
