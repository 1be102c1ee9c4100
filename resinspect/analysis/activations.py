"""Inputs and writes across channels and tokens: single channels that hold almost all, and directions in use."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

from resinspect.analysis.inputs import REMEDY, require
from resinspect.analysis.summary import LEVEL
from resinspect.errors import OptionError, TraceError

# Documents are put into so many groups, one of which is left out at a time.
_GROUPS = 10
_CHUNK = 1024
_BYTES = 2**28


def massive_activations(trace: xr.Dataset, *, channel_share: float = 0.5, times_median: float = 5.0) -> pd.DataFrame:
    """Tokens and readers whose input is nearly one channel: ``max_c |h_c|`` against the rms over channels.

    A row meets both thresholds: that channel holds at least ``channel_share`` of ``|h|^2`` (``max / rms`` is at least
    ``sqrt(channel_share * hidden_size)``), and the maximum is at least ``times_median`` that of the reader's median
    token. Sun et al. 2024 (Massive Activations, 2402.17762) ask for ``|h_c| > 100`` and about 1000 times the median
    magnitude over channels. A trace holds no median over channels, and rms includes the channel itself, so that
    ``max / rms`` cannot exceed ``sqrt(hidden_size)``; and the absolute threshold, which depends on the model's scale,
    is replaced by the one against other tokens.

    Args:
        trace: With ``reader_max`` and attribute ``hidden_size``.
        channel_share: Least share of one channel in the squared norm.
        times_median: Least maximum, in medians over tokens of the same reader.

    Returns:
        One row per token and reader, largest first: ``reader``, ``sample``, ``position``, ``token_id``, ``text``,
        ``maximum`` (activation), ``over_rms`` (null value ``sqrt(2 log hidden_size)``, Gaussian channels),
        ``channel_share``, ``times_median``. Empty: none. ``attrs`` has the thresholds and how many were looked at.

    Raises:
        TraceError: If ``reader_max`` or ``hidden_size`` is missing.
    """
    if "hidden_size" not in trace.attrs:
        raise TraceError("this measure needs the attribute 'hidden_size'; capture the trace again.")
    top, norm = require(trace, "reader_max", "reader_norm")
    width = float(trace.attrs["hidden_size"])
    share = np.divide(top, norm, out=np.zeros_like(top), where=norm > 0) ** 2
    typical = np.nanmedian(top, axis=0)
    times = np.divide(top, typical, out=np.full_like(top, np.inf), where=typical > 0)
    token, reader = np.nonzero((share >= channel_share) & (times >= times_median))
    columns = {name: trace.coords[name].values[token] for name in ("sample", "position", "token_id", "text")}
    numbers = {"maximum": top, "over_rms": np.sqrt(share * width), "channel_share": share, "times_median": times}
    frame = pd.DataFrame(
        {"reader": trace.coords["reader"].values[reader], **columns}
        | {name: values[token, reader] for name, values in numbers.items()}
    )
    frame = frame.sort_values("maximum", ascending=False, ignore_index=True)
    frame.attrs = {"channel_share": channel_share, "times_median": times_median, "looked_at": int(top.size)}
    return frame


def collective_rank(
    trace: xr.Dataset,
    *,
    of: Literal["source", "reader"] = "source",
    unit: bool = False,
    drop_first: int = 0,
    level: float = LEVEL,
) -> pd.DataFrame:
    """How many directions a sublayer's writes (or a reader's inputs) use across tokens: effective rank of a covariance.

    With eigenvalues l of the covariance over tokens and ``p = l / sum l``: ``entropy = exp(-sum p log p)`` (Roy and
    Vetterli 2007, who take singular values) and ``participation = (sum l)^2 / sum l^2``. The last row of sources adds
    up those of the sublayers. DeepCrossAttention (Heddes et al. 2025, 2502.06785, section 4) calls collective rank the
    sum of the ranks of linear layers, and learned weights help where it is small against the hidden size; here it is
    the rank of what layers write on these tokens.

    A trace that was opened lazily is read in chunks. The interval is a jackknife over up to 10 groups of documents, as
    a bootstrap would repeat documents and thereby lower the rank.

    Args:
        trace: With ``source_hidden`` or ``reader_hidden``.
        of: Writes or inputs.
        unit: Scale every vector to length 1 first, so that tokens of extreme norm do not decide the rank.
        drop_first: Leading tokens of every document to leave out.
        level: Of the intervals.

    Returns:
        One row per source or reader, and ``all sublayers``: ``name``, ``kind``, ``layer``, and for ``entropy`` and
        ``participation`` value, ``_low``, ``_high`` (NaN for fewer than two documents), ``null`` (participation of
        isotropic vectors, ``1 / (1 / hidden_size + 1 / tokens)``), ``hidden_size``, ``tokens``, ``documents``. In
        directions, 1 to the smaller of hidden size and tokens; NaN where nothing varies.

    Raises:
        TraceError: If the vectors are missing.
        OptionError: If ``of`` is neither.
    """
    if of not in ("source", "reader"):
        raise OptionError(f"of is {of!r}; choose source or reader.")
    name = f"{of}_hidden"
    if name not in trace:
        raise TraceError(f"this measure needs the variable {name!r}, which the trace does not hold; {REMEDY[name]}.")
    kept = np.flatnonzero(trace.coords["position"].values >= drop_first)
    documents, which = np.unique(trace.coords["sample"].values[kept], return_inverse=True)
    group = which % min(_GROUPS, max(len(documents), 1))
    ranks = np.stack([_left_out(m) for m in _moments(trace[name], kept, group, unit)], axis=0)
    kinds, layers = trace.coords[f"{of}_kind"].values, trace.coords[f"{of}_layer"].values
    labels = {"name": trace.coords[of].values.tolist(), "kind": kinds.tolist(), "layer": layers.tolist()}
    if of == "source":
        ranks = np.concatenate([ranks, ranks[layers >= 0].sum(0, keepdims=True)])
        extra = {"name": "all sublayers", "kind": "", "layer": -1}
        labels = {key: [*column, extra[key]] for key, column in labels.items()}
    width = trace.sizes["hidden"]
    columns = labels | _with_interval(ranks, level)
    null = np.full(len(ranks), 1 / (1 / width + 1 / max(len(kept), 1)))
    null[len(kinds) :] *= (layers >= 0).sum()
    return pd.DataFrame(columns).assign(null=null, hidden_size=width, tokens=len(kept), documents=len(documents))


def _moments(vectors: xr.DataArray, kept: np.ndarray, group: np.ndarray, unit: bool) -> Iterator[np.ndarray]:
    """For each source or reader: ``(group, d + 1, d + 1)`` second moments of its vectors with a 1 appended."""
    tokens, slots, width = vectors.shape
    groups = int(group.max()) + 1 if len(group) else 1
    at_once = max(1, _BYTES // (8 * groups * (width + 1) ** 2))
    member = np.full(tokens, -1)
    member[kept] = group
    for first in range(0, slots, at_once):
        part = vectors[:, first : first + at_once]
        sums = np.zeros((part.shape[1], groups, width + 1, width + 1))
        for start in range(0, tokens, _CHUNK):
            here = member[start : start + _CHUNK]
            values = part[start : start + _CHUNK].values.astype(np.float64)
            for g in np.unique(here[here >= 0]):
                # A vector with a NaN or an infinity in it says nothing about directions.
                mine = np.where(np.isfinite(values).all(-1, keepdims=True), values, np.nan)[here == g]
                sums[:, g] += _moment(mine, unit)
        yield from sums


def _moment(values: np.ndarray, unit: bool) -> np.ndarray:
    if unit:
        norm = np.linalg.norm(values, axis=-1, keepdims=True)
        values = np.divide(values, norm, out=np.zeros_like(values), where=norm > 0)
    known = ~np.isnan(values[..., :1])
    extended = np.concatenate([np.nan_to_num(values), known], axis=-1).swapaxes(0, 1)
    return extended.swapaxes(1, 2) @ extended


def _left_out(moments: np.ndarray) -> np.ndarray:
    """Both ranks ``(1 + group, 2)`` of all groups and without each of them, from ``(group, d + 1, d + 1)``."""
    total = moments.sum(0)
    parts = total[None] if len(moments) < 2 else np.concatenate([total[None], total - moments])
    count = np.maximum(parts[:, -1:, -1:], 1)
    mean = parts[:, :-1, -1:] / count
    spectrum = np.linalg.eigvalsh(parts[:, :-1, :-1] / count - mean @ mean.swapaxes(1, 2))
    # Rounding of the moments, not variance.
    spectrum[spectrum < 1e-12 * np.einsum("gcc->g", parts[:, :-1, :-1] / count)[:, None]] = 0
    whole = spectrum.sum(-1, keepdims=True)
    share = np.divide(spectrum, whole, out=np.full_like(spectrum, np.nan), where=whole > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.stack([np.exp(-(share * logs).sum(-1)), 1 / (share**2).sum(-1)], axis=1)


def _with_interval(ranks: np.ndarray, level: float) -> dict[str, np.ndarray]:
    """Columns from ``(row, 1 + group, 2)``: the estimate of all, and the jackknife's t interval."""
    columns, groups = {}, ranks.shape[1] - 1
    for i, name in enumerate(("entropy", "participation")):
        value, without = ranks[:, 0, i], ranks[:, 1:, i]
        half = np.full(len(value), np.nan)
        if groups > 1:
            spread = np.sqrt((groups - 1) / groups * ((without - without.mean(1, keepdims=True)) ** 2).sum(1))
            half = spread * stats.t.ppf((1 + level) / 2, groups - 1)
        columns |= {name: value, f"{name}_low": np.maximum(value - half, 1.0), f"{name}_high": value + half}
    return columns
