"""Whether tokens that are hard to predict are routed differently."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr
from scipy.sparse import csr_array

from resinspect.analysis.dilution import effective_sources, magnitude_share
from resinspect.analysis.inputs import labelled, require, weights
from resinspect.analysis.summary import LEVEL, RESAMPLES, interval
from resinspect.analysis.tokens import indicator, label_tokens, shuffles
from resinspect.errors import OptionError

# Fewer tokens than this in a document order too little to be correlated.
FEWEST = 5


def routing_deviation(trace: xr.Dataset) -> xr.DataArray:
    """How far a token's routing is from the mean over all tokens: ``|W_t - mean W| / |mean W|`` for each reader.

    Args:
        trace: Any.

    Returns:
        ``(token, reader)``, no unit, non-negative; 0 where weights are static. NaN with an unknown weight.
        Null value 0. Source: own definition.
    """
    weight = weights(trace)
    known = ~np.isnan(weight).any(-1, keepdims=True)
    mean = np.where(known, weight, 0).sum(0) / np.maximum(known.sum(0), 1)
    size = np.linalg.norm(mean, axis=-1)
    distance = np.linalg.norm(weight - mean, axis=-1)
    values = np.divide(distance, size, out=np.full_like(distance, np.nan), where=size > 0)
    attrs = {"long_name": "distance from the mean routing", "units": "1", "formula": "|W_t - mean W| / |mean W|"}
    return labelled(trace, values, ("token", "reader"), "routing_deviation", attrs)


def routing_and_loss(
    trace: xr.Dataset,
    *,
    measures: Mapping[str, xr.DataArray] | None = None,
    loss_of: Literal["next", "current"] = "next",
    drop_first: int = 0,
    permutations: int = 200,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Rank correlation (Spearman) of routing with the loss, within documents.

    Each document's correlation is weighted by its tokens; a document of fewer than 5, or in which either side is all
    one value, has none. The null permutes the loss within documents and position bins: what position alone brings
    about remains in it, and ``null_mean`` is then off 0 (in short documents also part of any association, as bins of
    one or two tokens cannot be permuted). Token identity is not held fixed: some types are hard and routed their own
    way. Embedding share and effective sources also follow the norms of writes, so in static schemes too.

    Args:
        trace: With ``loss``.
        measures: name -> ``(token, reader)`` or ``(token,)``; by default ``deviation`` (``routing_deviation``),
            ``embedding_share`` (magnitude share of the embedding) and ``effective_sources``.
        loss_of: ``"next"`` is the loss of the token that this one predicts; ``"current"`` that of the token itself, as
            predicted before it was read.
        drop_first: Leading tokens of every document to leave out.
        permutations: Of the null.
        resamples: Bootstrap resamples of documents.
        level: Of the intervals, and of the band of the null, both two-sided.
        seed: Of permutations and resamples.

    Returns:
        Rows quantity x reader: ``rho`` (-1 to 1), ``low``, ``high``, ``null_mean``, ``null_low``, ``null_high``,
        ``tokens``, ``documents``, ``types``. Reader ``all`` is the measure's mean over readers. NaN where the measure
        is the same for all tokens.
        Source: rank correlation of Spearman 1904, pooled over documents by us.

    Raises:
        OptionError: If an option is not allowed.
        TraceError: If there is no loss.
    """
    if loss_of not in ("next", "current"):
        raise OptionError(f"loss_of is {loss_of!r}; choose next or current.")
    (loss,) = require(trace, "loss")
    loss = loss if loss_of == "next" else _of_token(loss, trace)
    table = _table(trace, measures)
    labels = label_tokens(trace, drop_first=drop_first)
    values, loss = table.values[labels.kept], loss[labels.kept]
    absent = np.isnan(values).mean(0) > 0.5
    used = ~np.isnan(loss) & ~np.isnan(values[:, ~absent]).any(1)
    labels = labels.of(used)
    cells = indicator(labels.document, labels.documents)
    ranks = _standard_ranks(np.column_stack([loss, values])[used], labels.document, cells)
    lengths = np.where(cells.sum(1) >= FEWEST, cells.sum(1), 0)[:, None]
    varies = (cells @ ranks**2) > 0.5
    counts = lengths * (varies[:, :1] & varies[:, 1:])
    weighted = ranks[:, 1:] * lengths[labels.document]
    sums, total = cells @ (weighted * ranks[:, :1]), counts.sum(0)
    low, high = interval(sums, counts, resamples=resamples, level=level, seed=seed)
    null = [weighted.T @ ranks[order, 0] for order in shuffles(labels.places(), permutations, seed)]
    null = _over(np.stack(null), total)
    tail = (1 - level) / 2
    frame = table.columns.to_frame(index=False).assign(
        rho=_over(sums.sum(0), total),
        low=low,
        high=high,
        null_mean=null.mean(0),
        null_low=np.quantile(null, tail, axis=0),
        null_high=np.quantile(null, 1 - tail, axis=0),
        **labels.counts(),
    )
    frame.attrs = {"measure": "routing_and_loss", "units": "1", "loss_of": loss_of, "drop_first": drop_first}
    return frame


def _of_token(loss: np.ndarray, trace: xr.Dataset) -> np.ndarray:
    """The loss of each token itself: what the token before it had; NaN for the first of a document."""
    samples, position = trace.coords["sample"].values, trace.coords["position"].values
    follows = (samples[1:] == samples[:-1]) & (position[1:] == position[:-1] + 1)
    return np.concatenate([[np.nan], np.where(follows, loss[:-1], np.nan)])


def _table(trace: xr.Dataset, measures: Mapping[str, xr.DataArray] | None) -> pd.DataFrame:
    """``(token, (quantity, reader))``; each measure has one column more, its mean over readers."""
    if measures is None:
        embedding = trace.coords["source_kind"].values == "embed"
        measures = {
            "deviation": routing_deviation(trace),
            "embedding_share": magnitude_share(trace).isel(source=embedding).sum("source", skipna=False),
            "effective_sources": effective_sources(trace),
        }
    columns = {}
    for name, measure in measures.items():
        if measure.dims not in (("token", "reader"), ("token",)):
            raise OptionError(f"measure {name} has dimensions {measure.dims}; needed are token, or token and reader.")
        if measure.ndim == 2:
            columns |= {(name, str(r)): measure.values[:, i] for i, r in enumerate(measure.coords["reader"].values)}
        columns[name, "all"] = measure.values if measure.ndim == 1 else measure.mean("reader").values
    return pd.DataFrame(columns).rename_axis(columns=["quantity", "reader"])


def _standard_ranks(values: np.ndarray, document: np.ndarray, cells: csr_array) -> np.ndarray:
    """Ranks within each document, centred and of length 1 there; 0 where all are equal."""
    ranks = pd.DataFrame(values).groupby(document).rank().to_numpy()
    ranks = ranks - ((cells @ ranks) / np.maximum(cells.sum(1), 1)[:, None])[document]
    length = np.sqrt(cells @ ranks**2)[document]
    return np.divide(ranks, length, out=np.zeros_like(ranks), where=length > 0)


def _over(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)
