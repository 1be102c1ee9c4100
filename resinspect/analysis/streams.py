"""Mixing of parallel residual streams: how much it can amplify, lose or blur what they hold.

Every measure is per token, also of products of many sublayers. What an architecture fixes is no finding: the attribute
``guaranteed`` of each measure says so, and is empty where the value was free.
"""

from typing import Literal

import numpy as np
import xarray as xr

from resinspect.analysis.inputs import labelled
from resinspect.analysis.mixing import DIMS, SPANS, Span, blurs, fixed, stream_mixing
from resinspect.errors import OptionError

AXES = {"forward": (-1, "rows"), "backward": (-2, "columns")}


def stream_gain(
    trace: xr.Dataset,
    *,
    direction: Literal["forward", "backward"] = "forward",
    span: Span = "single",
    absolute: bool = False,
) -> xr.DataArray:
    """The most that mixing amplifies: largest absolute row sum (forward) or column sum (backward) of M.

    The "Amax gain magnitude" of mHC (arXiv 2512.24880, section 3.1), there with ``from_start`` forward and ``to_end``
    backward.

    Args:
        trace: As for ``stream_mixing``.
        direction: Rows bound what equal streams become, columns what happens to gradients.
        span: As for ``stream_mixing``.
        absolute: Sum absolute entries instead: the bound for streams that differ (the infinity and the 1-norm).

    Returns:
        ``(token, site)``, no unit, non-negative; null value 1 (identity, or doubly stochastic).
    """
    mixing = stream_mixing(trace, span=span)
    sums = np.abs(_sums(np.abs(mixing.values) if absolute else mixing.values, direction)).max(-1)
    entry = "sum |M_ij|" if absolute else "|sum M_ij|"
    attrs = {
        "long_name": f"{direction} gain",
        "units": "1",
        "formula": f"max of {entry} over {AXES[direction][1]}, M = {SPANS[span]}",
        "guaranteed": fixed(trace, AXES[direction][1]),
        "null": 1.0,
    }
    return labelled(mixing, sums, DIMS[:2], f"{direction}_gain", attrs)


def least_stream_gain(
    trace: xr.Dataset, *, direction: Literal["forward", "backward"] = "forward", span: Span = "single"
) -> xr.DataArray:
    """The least that mixing keeps: smallest absolute row or column sum of M, which a largest sum cannot show.

    Args:
        trace: As for ``stream_mixing``.
        direction: ``"forward"`` takes rows, ``"backward"`` columns.
        span: As for ``stream_mixing``.

    Returns:
        ``(token, site)``, no unit, non-negative; null value 1, 0: a stream that gets or gives nothing.
        Source: own definition, beside the gain of mHC.
    """
    mixing = stream_mixing(trace, span=span)
    sums = np.abs(_sums(mixing.values, direction)).min(-1)
    attrs = {
        "long_name": f"least {direction} gain",
        "units": "1",
        "formula": f"min of |sum M_ij| over {AXES[direction][1]}, M = {SPANS[span]}",
        "guaranteed": fixed(trace, AXES[direction][1]),
        "null": 1.0,
    }
    return labelled(mixing, sums, DIMS[:2], f"least_{direction}_gain", attrs)


def stream_deviation(
    trace: xr.Dataset, *, sums: Literal["rows", "columns"] = "rows", span: Span = "single"
) -> xr.DataArray:
    """How far M is from stochastic: ``max |sum M_ij - 1|`` over its rows or columns.

    Args:
        trace: As for ``stream_mixing``.
        sums: Which sums.
        span: As for ``stream_mixing``.

    Returns:
        ``(token, site)``, no unit, non-negative; null value 0. In Sinkhorn schemes the sums normed last are 1 by
        construction, the others are what is to be measured.
        Source: own definition, beside the gain of mHC.

    Raises:
        OptionError: If ``sums`` is neither.
    """
    direction = next((d for d, (_, name) in AXES.items() if name == sums), None)
    if direction is None:
        raise OptionError(f"sums is {sums!r}; choose rows or columns.")
    mixing = stream_mixing(trace, span=span)
    values = np.abs(_sums(mixing.values, direction) - 1).max(-1)
    attrs = {
        "long_name": f"deviation of {sums} from sums of 1",
        "units": "1",
        "formula": f"max |sum M_ij - 1| over {sums}, M = {SPANS[span]}",
        "guaranteed": fixed(trace, sums),
        "null": 0.0,
    }
    return labelled(mixing, values, DIMS[:2], f"{sums}_deviation", attrs)


def second_singular_value(trace: xr.Dataset, *, span: Span = "single") -> xr.DataArray:
    """Second singular value of M: how much of the differences between streams mixing lets through.

    Args:
        trace: As for ``stream_mixing``.
        span: As for ``stream_mixing``.

    Returns:
        ``(token, site)``, no unit, non-negative: 1 for the identity, 0 for a matrix of rank 1, after which all streams
        hold the same up to a factor. NaN with a single stream.
        Null value 1: no mixing. Source: own definition, after the spectral gap of Markov chains.
    """
    mixing = stream_mixing(trace, span=span)
    flat = mixing.values.reshape(-1, *mixing.shape[2:])
    second = np.full(len(flat), np.nan)
    known = np.isfinite(flat).all((1, 2))
    if mixing.shape[-1] > 1:
        second[known] = np.linalg.svd(flat[known], compute_uv=False)[:, 1]
    attrs = {
        "long_name": "second singular value",
        "units": "1",
        "formula": f"sigma_2(M), M = {SPANS[span]}",
        "guaranteed": fixed(trace, "unmixed") or blurs(trace, span),
    }
    values = second.reshape(mixing.shape[:2])
    return labelled(mixing, values, DIMS[:2], "second_singular_value", attrs)


def stream_distance(
    trace: xr.Dataset, *, to: Literal["identity", "uniform"] = "uniform", span: Span = "single"
) -> xr.DataArray:
    """Frobenius distance of M from no mixing, or from complete mixing ``1 1^T / n``.

    Args:
        trace: As for ``stream_mixing``.
        to: From which matrix.
        span: As for ``stream_mixing``.

    Returns:
        ``(token, site)``, no unit, non-negative. The identity and the uniform matrix are ``sqrt(n - 1)`` apart.
        Null value 0. Source: own definition.

    Raises:
        OptionError: If ``to`` is neither.
    """
    mixing = stream_mixing(trace, span=span)
    n = mixing.shape[-1]
    goals = {"identity": np.eye(n), "uniform": np.full((n, n), 1 / n)}
    if to not in goals:
        raise OptionError(f"to is {to!r}; choose identity or uniform.")
    values = np.linalg.norm(mixing.values - goals[to], axis=(2, 3))
    attrs = {
        "long_name": f"distance of mixing from {to}",
        "units": "1",
        "formula": f"|M - {'1' if to == 'identity' else '1 1^T / n'}|_F, M = {SPANS[span]}",
        "guaranteed": fixed(trace, "unmixed") or (blurs(trace, span) if to == "uniform" else ""),
        "apart": float(np.sqrt(n - 1)),
    }
    return labelled(mixing, values, DIMS[:2], f"distance_from_{to}", attrs)


def _sums(matrices: np.ndarray, direction: str) -> np.ndarray:
    if direction not in AXES:
        raise OptionError(f"direction is {direction!r}; choose forward or backward.")
    return matrices.sum(AXES[direction][0])
