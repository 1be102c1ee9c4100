"""How static routing is: one number for each model, and for each native of a stream scheme."""

from collections.abc import Iterable
from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.entries import Block, blocks, read_values, rounding
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES
from resinspect.analysis.tokens import indicator, label_tokens
from resinspect.errors import OptionError, TraceError

# Schemes whose weights are the same for every token by construction, whatever was trained.
STATIC_SCHEMES = ("pre_ln", "denseformer")
STREAM_NATIVES = ("native_pre", "native_post", "native_mix")


def staticness(
    trace: xr.Dataset,
    *,
    of: Iterable[str] | None = None,
    around: Literal["reader", "zero"] = "reader",
    drop_first: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Share of the variance of W that a fixed weight for each reader and source explains: 1 is fully static.

    ``1 - sum (W - m_rs)^2 / sum (W - b_r)^2`` over tokens, readers and sources, with m the mean over tokens and b one
    mean for each reader, both over the other documents (leave one out). Around b, a reader's role is how it differs
    from reading all its sources alike: 0 means that the fixed part of its profile is flat, and readers of one source,
    whose weight is given, count for nothing. With ``around="zero"``, ``b = 0``: a flat profile counts as static too,
    so that weights of one sign never come near 0. Readers and sources with large, variable weights weigh more.

    Args:
        trace: Any; natives captured with ``keep=("natives", ...)``.
        of: Variables; by default ``weight`` and what there is of ``native_pre``, ``native_post``, ``native_mix`` (their
            readers are sites, their sources streams or pairs of streams).
        around: ``"reader"`` or ``"zero"``.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples of documents, with the means kept.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        One row for each variable: ``staticness``, ``low``, ``high`` (NaN with one document), ``fixed`` (no weight
        differs over tokens by more than rounding: exactly 1), ``guaranteed`` (``"yes"`` where the scheme allows nothing
        else; ``"unknown"`` for other fixed weights: a static variant of a scheme and an untrained router look alike;
        ``"no"``), ``around``, ``tokens``, ``documents``, ``types``.
        Null value 1 where the scheme fixes its weights; 0 is a flat profile. Source: own definition, for the open
        question of essay 000.

    Raises:
        OptionError: If ``around`` is something else.
        TraceError: If there is no such variable, or nothing is known.
    """
    if around not in ("reader", "zero"):
        raise OptionError(f"around is {around!r}; choose reader or zero.")
    labels, rows = label_tokens(trace, drop_first=drop_first), []
    picks = bootstrap(labels.documents, resamples, seed)
    for name in ("weight", *(n for n in STREAM_NATIVES if n in trace)) if of is None else of:
        found = list(blocks(read_values(trace, name), labels, rounding(trace)))
        if not found:
            raise TraceError(f"{name} has no token at which all weights of a reader are known.")
        fixed = not any(np.ptp(block.table, axis=0).any() for block in found)
        values = np.ones(len(picks))
        if not fixed:
            base, left = (sum(part) for part in zip(*(_errors(block, around) for block in found), strict=True))
            values = 1 - (picks @ left) / (picks @ base)
        counts = pd.DataFrame([block.labels.counts() for block in found]).max().to_dict()
        low, high = percentiles(values, counts["documents"], level)
        sure = ("yes" if trace.attrs["scheme"] in STATIC_SCHEMES else "unknown") if fixed else "no"
        rows.append((name, values[0], low, high, fixed, sure, around, *counts.values()))
    columns = ["variable", "staticness", "low", "high", "fixed", "guaranteed", "around", *counts]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs = {"measure": "staticness", "units": "1", "drop_first": drop_first, "level": level}
    return frame


def _errors(block: Block, around: str) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors of each document around the base and around the fixed weights of the other documents."""
    labels, groups = block.labels, np.eye(len(block.readers))[block.group]
    cells = indicator(labels.document, labels.documents)
    lengths, sums, squares = cells.sum(1)[:, None], cells @ block.table, cells @ block.table**2
    rest = lengths.sum() - lengths
    mean = np.divide(sums.sum(0) - sums, rest, out=np.full(sums.shape, np.nan), where=rest > 0)
    base = (mean @ groups / groups.sum(0)) @ groups.T if around == "reader" else np.zeros_like(mean)
    base, left = ((squares - 2 * centre * sums + lengths * centre**2).sum(1) for centre in (base, mean))
    return base, left
