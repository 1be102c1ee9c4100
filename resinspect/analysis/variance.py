"""Does a layer's role stay, or drift with context? The variance of routing, part by part, in documents held out."""

from collections.abc import Mapping
from functools import reduce
from operator import add

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.entries import Block, blocks, read_values, rounding
from resinspect.analysis.heldout import Parts, held_out_parts
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES
from resinspect.analysis.tokens import label_tokens
from resinspect.errors import OptionError, TraceError

# A sum of squares below this fraction of the values' own is their rounding.
NOTHING = 1e-24


def variance_of_routing(
    trace: xr.Dataset,
    *,
    of: str | xr.DataArray = "weight",
    domains: Mapping[int, str] | None = None,
    drop_first: int = 0,
    folds: int = 5,
    permutations: int = 20,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Which part of the variance of W is fixed, and which follows position, token, domain, document or context.

    Parts are taken in order, each of what those before leave over, and evaluated in documents that the predictor has
    not seen (cross-validation over documents), as ``(SSE before - SSE after) / SSE of one mean for each reader``, sums
    over tokens and sources:

    - ``static``: a mean for each reader and source, against one mean for each reader (it reads all sources alike);
    - ``position``: means of position bins that double in length (0, 1-2, 3-6, ...);
    - ``token``: means of token types; those of one fold only share one;
    - ``domain``: means of the domains given;
    - ``document``: what the two halves of a document have in common beyond all that, each predicted from the other;
      no other document can predict it;
    - ``context``: the rest: what depends on more of the prompt than the labels above.

    The parts sum to 1. All means but the static one are shrunk to the part before (empirical Bayes), so a label that
    explains nothing scores about 0; a little below 0 is possible. What a type does that too few other documents have
    falls to the parts after it, so ``context`` is an upper bound, and its ``in_sample`` value a lower one. A reader of
    the embedding alone can follow nothing but the token (and a position that the embedding contains): its token part
    is guaranteed, and its context such types. The total (reader ``all``) pools sums of squares: readers and sources
    with large, variable weights weigh more, which ``share`` shows. Entries that are NaN for most tokens are left out,
    then the tokens with a NaN in what remains of the reader.

    Where no weight of a reader differs over tokens by more than rounding (``fixed``), there is nothing to explain: as
    in ``staticness``, ``static`` is 1 by definition and every other part and null 0, also for a reader of one source or
    of equal weights, and of one document. ``staticness`` says whether the scheme guarantees it.

    Args:
        trace: Of two documents at least.
        of: A variable, such as ``"weight"`` or ``"native_mix"``, or a measure such as ``magnitude_share(trace)``; the
            dimension after ``token`` is the reader (site) that shares one mean.
        domains: Domain of each document (``sample``), such as the part of the corpus it comes from.
        drop_first: Leading tokens of every document to leave out.
        folds: Of the cross-validation; fewer if there are fewer documents.
        permutations: For the null: positions within documents; token types within documents and position bins; domains
            over documents; pairs of halves over documents.
        resamples: Bootstrap resamples of documents, with the fitted predictors kept.
        level: Of the intervals, and of ``null_high``.
        seed: Of folds, permutations and resamples.

    Returns:
        Rows reader x component: ``r2``, ``low``, ``high``, ``null_mean``, ``null_high`` (a one-sided bound; NaN where
        no label can be permuted), ``in_sample`` (the same fitted and scored on all documents without shrinkage, which
        grows with types / tokens and is no evidence), ``fixed``, ``share`` (the reader's part of the pooled sum of
        squares; NaN if that is rounding), ``tokens``, ``documents``, ``types``. With one document, ``r2`` is NaN but
        for fixed weights, and so are all intervals.
        Source: own definition, sequential R^2 on held-out documents.

    Raises:
        OptionError: If an option is out of range.
        TraceError: If there is no such variable, or nothing is known.
    """
    if folds < 2 or permutations < 1 or not 0 < level < 1:
        raise OptionError(
            f"folds is {folds}, permutations {permutations}, level {level}; needed are at least 2, at least 1, and "
            "between 0 and 1."
        )
    values, labels = read_values(trace, of), label_tokens(trace, drop_first=drop_first, domains=domains)
    options, dim = {"folds": folds, "permutations": permutations, "seed": seed}, values.dims[1]
    found = [
        (block, held_out_parts(block.table, block.group, block.labels, **options))
        for block in blocks(values, labels, rounding(trace))
    ]
    if not found:
        raise TraceError(f"{values.name} has no token at which all weights of a reader are known.")
    picks = bootstrap(labels.documents, resamples, seed)
    whole = reduce(add, [parts.total() for _, parts in found])
    fixed = {reader: _is_fixed(block, g) for block, _ in found for g, reader in enumerate(block.readers)}
    rows = {
        reader: _rows(parts.of(g), block.labels.counts(), picks, level, fixed=fixed[reader]).assign(
            share=_part(parts.of(g), whole)
        )
        for block, parts in found
        for g, reader in enumerate(block.readers)
    }
    counts = pd.DataFrame([block.labels.counts() for block, _ in found]).max().to_dict()
    every = _rows(whole, counts, picks, level, fixed=all(fixed.values()))
    rows["all"] = every.assign(share=_part(whole, whole))
    order = [name for name in (*values.coords[dim].values.astype(str), "all") if name in rows]
    frame = pd.concat([rows[name].assign(**{dim: name}) for name in order], ignore_index=True)
    counted = ["fixed", "share", *counts]
    frame = frame[[dim, *frame.columns.drop([dim, *counted]), *counted]]
    frame.attrs = {"measure": "variance_of_routing", "of": values.name, "drop_first": drop_first, "level": level}
    return frame


def _is_fixed(block: Block, group: int) -> bool:
    """Whether all weights of a reader are the same for all tokens; ``blocks`` has taken out rounding."""
    return not np.ptp(block.table[:, block.group == group], axis=0).any()


def _rows(parts: Parts, counts: dict[str, int], picks: np.ndarray, level: float, *, fixed: bool) -> pd.DataFrame:
    """One row for each part and one for the rest."""
    base, least = picks @ parts.base, NOTHING * parts.size
    shares = _shares(picks @ parts.gain.T, base[:, None], least)
    fitted = _shares(parts.fitted, parts.fitted_base, least)
    null = _shares(parts.null.T, base[0], least)[:, :-1]
    if fixed:
        fitted = np.eye(len(fitted))[0]
        shares, null = np.tile(fitted, (len(shares), 1)), np.tile(np.where(fitted[:-1], np.nan, 0), (len(null), 1))
    low, high = percentiles(shares, counts["documents"], level)
    columns = {
        "component": [*parts.names, "context"],
        "r2": shares[0],
        "low": low,
        "high": high,
        "null_mean": [*null.mean(0), np.nan],
        "null_high": [*np.quantile(null, level, axis=0), np.nan],
        "in_sample": fitted,
        "fixed": fixed,
    }
    return pd.DataFrame({**columns, **counts})


def _part(parts: Parts, whole: Parts) -> float:
    known = whole.base.sum() > NOTHING * whole.size
    return float(parts.base.sum() / whole.base.sum()) if known else np.nan


def _shares(gain: np.ndarray, base: np.ndarray, least: float) -> np.ndarray:
    """Gains over the base, NaN where that is only rounding; a last column holds what is left."""
    shares = np.divide(gain, base, out=np.full(gain.shape, np.nan), where=np.broadcast_to(base > least, gain.shape))
    return np.concatenate([shares, 1 - shares.sum(-1, keepdims=True)], axis=-1)
