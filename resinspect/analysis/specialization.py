"""Specialization: do attention and MLP read differently, do the ends matter, how many streams would W need."""

from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import labelled, reach, weights
from resinspect.analysis.profiles import (
    Share,
    distances,
    embedding_share,
    embeddings,
    expected_lag,
    locality,
    profile_entropy,
    shares,
)
from resinspect.analysis.summary import LEVEL, RESAMPLES, summarise
from resinspect.errors import OptionError, TraceError


def attention_mlp_contrast(
    trace: xr.Dataset,
    *,
    newest: int = 1,
    share: Share = "magnitude",
    drop_first: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """How attention reads against how the MLP of the same layer reads.

    Each quantity is first held against what uniform reading of the same number of sources gives, so that attention and
    MLP, which read different numbers of sources, can be compared: ``locality - newest / n``, ``embedding_share - 1 /
    n``, ``expected_lag / ((n + 1) / 2)``, ``profile_entropy``. Then attention minus MLP within a layer and a token, the
    mean over layers per token, and the mean over tokens. The newest source of an MLP is its layer's attention and the
    other way round: a contrast in locality may say which writes are read, and not who reads. Kimi Team 2026
    (2603.15031) find attention to read more broadly than MLPs.

    Args:
        trace: With what the share needs.
        newest: How many sources count as newest.
        share: ``"magnitude"`` or ``"weight"``.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents; pairs stay together.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        One row per ``quantity``: ``attention``, ``mlp`` (their means), ``contrast``, ``median``, ``low``, ``high``,
        ``null`` (0), ``layers`` (that enter), ``tokens``, ``documents``. Layers in which a quantity is fixed by the
        number of sources are left out.

    Raises:
        TraceError: If no layer has readers of kind ``attn`` and of kind ``mlp``.
        OptionError: If there is no such share, or it is signed.
    """
    lag, local = expected_lag(trace, share=share), locality(trace, newest=newest, share=share)
    embedding = embedding_share(trace, share=share)
    found = {
        "locality over uniform": local.values - local["null"].values,
        "embedding share over uniform": embedding.values - embedding["null"].values,
        "relative expected lag": lag.values / lag["null"].values,
        "profile entropy": profile_entropy(trace, share=share).values,
    }
    pairs = [_by_layer(trace, values) for values in found.values()]
    columns = [_mean(values, 1) for attn, mlp in pairs for values in (attn - mlp, attn + 0 * mlp, mlp + 0 * attn)]
    table = _summary(trace, np.stack(columns, axis=1), drop_first, resamples=resamples, level=level, seed=seed)
    contrast, attention, mlp = (table[i::3].reset_index(drop=True) for i in range(3))
    layers = [int((~np.isnan(attn - mlp)).any(0).sum()) for attn, mlp in pairs]
    labels = {"quantity": list(found), "attention": attention["mean"], "mlp": mlp["mean"], "contrast": contrast["mean"]}
    numbers = contrast[["median", "low", "high"]].assign(null=0.0, layers=layers)
    return pd.concat([pd.DataFrame(labels), numbers, contrast[["tokens", "documents"]]], axis=1)


def ends_against_middle(
    trace: xr.Dataset,
    *,
    newest: int = 2,
    share: Share = "magnitude",
    each_reader: bool = False,
    drop_first: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """The claim that a reader's input layer and its last few sources matter, and what lies between matters little.

    (Essay 003; DeepCrossAttention, 2502.06785, appendix H.) Per token, a reader's share of the embedding, of its
    ``newest`` sources, of both, and of those between, minus what uniform reading gives; averaged over the readers that
    have something between. The claim holds on these documents if embedding and newest are above uniform and what lies
    between is below, each by its interval, in all rows given: ``attrs["holds"]``, None with one document.

    Args:
        trace: With what the share needs.
        newest: How many sources count as the last few.
        share: As in ``reading_profile``. With a plain residual, weight shares are uniform by construction.
        each_reader: One set of rows per reader instead of their mean.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        Rows ``part`` (``embedding``, ``newest``, ``both``, ``between``) with ``reader`` (or ``all``), ``share``,
        ``uniform``, ``excess``, ``median``, ``low``, ``high`` (of the excess), ``null`` (0), ``readers``, ``tokens``,
        ``documents``.

    Raises:
        TraceError: If no reader has sources between.
        OptionError: If there is no such share, or ``newest`` is below 1.
    """
    if newest < 1:
        raise OptionError(f"newest is {newest}; at least 1 source must count as newest.")
    first, last = reach(trace) & embeddings(trace), (distances(trace) > 0) & (distances(trace) <= newest)
    last &= ~first
    parts = {"embedding": first, "newest": last, "both": first | last, "between": reach(trace) & ~first & ~last}
    used = np.flatnonzero(parts["between"].any(-1) & first.any(-1))
    if not len(used):
        raise TraceError(f"no reader has sources between the embedding and its newest {newest}; choose fewer newest.")
    chosen = np.stack(list(parts.values()))[:, used]
    values = np.einsum("trs,prs->tpr", shares(trace, share)[:, used], chosen.astype(float))
    uniform = chosen.sum(-1) / reach(trace)[used].sum(-1)
    excess, readers = values - uniform, trace.coords["reader"].values[used].tolist()
    if not each_reader:
        excess, uniform, readers = _mean(excess, 2)[..., None], uniform.mean(-1, keepdims=True), ["all"]
    table = _summary(trace, excess.reshape(len(values), -1), drop_first, resamples=resamples, level=level, seed=seed)
    labels = pd.MultiIndex.from_product([parts, readers], names=["part", "reader"]).to_frame(index=False)
    labels = labels.assign(share=table["mean"] + uniform.ravel(), uniform=uniform.ravel(), excess=table["mean"])
    numbers = table[["median", "low", "high"]].assign(null=0.0, readers=1 if each_reader else len(used))
    frame = pd.concat([labels, numbers, table[["tokens", "documents"]]], axis=1)
    frame.attrs = {"newest": newest, "share": share, "holds": _holds(frame), "drop_first": drop_first, "level": level}
    return frame


def semiseparable_rank(
    trace: xr.Dataset,
    *,
    definition: Literal["effective", "tolerance"] = "effective",
    tolerance: float = 1e-4,
    tokens: int = 2000,
) -> xr.DataArray:
    """How many residual streams W would need: the rank of what passes from early sources to late readers.

    For every point k in depth, the block ``W[r, s]`` of readers that come after source k - 1 and sources s < k. A
    scheme that carries n streams has blocks of rank n at most, whatever it learned (a plain residual 1, n-stream
    hyper-connections n: by construction); a reader with its own weights for all sources can reach the full rank.

    Args:
        trace: Any.
        definition: ``"effective"`` is ``exp(-sum p log p)`` with ``p`` the singular values over their sum (Roy and
            Vetterli 2007); ``"tolerance"`` counts singular values above ``tolerance`` times the largest.
        tolerance: Of that count; above the rounding of W.
        tokens: At most so many tokens, evenly spaced.

    Returns:
        ``(token, cut)`` with ``cut`` the number of sources before it, coordinate ``full`` the largest rank a block of
        that shape can have; 1 to ``full``, NaN where the block is zero or holds unknown weights.
        Null value 1: the plain residual.

    Raises:
        OptionError: If there is no such definition, or ``tokens`` is below 1.
    """
    if definition not in ("effective", "tolerance"):
        raise OptionError(f"definition is {definition!r}; choose effective or tolerance.")
    if tokens < 1:
        raise OptionError(f"tokens is {tokens}; at least 1 is needed.")
    total = trace.sizes["token"]
    part = trace.isel(token=np.unique(np.linspace(0, total - 1, min(tokens, total)).astype(int)))
    weight, prefix = weights(part), part.coords["reader_prefix"].values
    cuts = np.unique(prefix)
    blocks = [weight[:, prefix >= cut, :cut] for cut in cuts]
    ranks = np.stack([_rank(block, tolerance if definition == "tolerance" else None) for block in blocks], axis=1)
    attrs = {"long_name": f"{definition} rank of the routing weights across a cut", "units": "1", "null": 1.0}
    attrs |= {"tolerance": tolerance} if definition == "tolerance" else {}
    array = labelled(part, ranks, ("token", "cut"), "semiseparable_rank", attrs)
    cut = ("cut", cuts, {"long_name": "sources before the cut"})
    return array.assign_coords(cut=cut, full=("cut", [min(block.shape[1:]) for block in blocks]))


def _rank(block: np.ndarray, tolerance: float | None) -> np.ndarray:
    unknown = np.isnan(block).any((1, 2))
    size = np.linalg.svd(np.where(unknown[:, None, None], 0, block), compute_uv=False)
    total = size.sum(-1, keepdims=True)
    share = np.divide(size, total, out=np.full_like(size, np.nan), where=total > 0)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    rank = np.exp(-(share * logs).sum(-1)) if tolerance is None else (size > tolerance * size[:, :1]).sum(-1)
    return np.where(unknown | (total[:, 0] == 0), np.nan, rank)


def _by_layer(trace: xr.Dataset, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means ``(token, layer)`` over attention readers and over MLP readers, for layers that have both."""
    kinds = trace.coords["reader_kind"].values.tolist()
    # The place before the dot tells passes of a looped layer apart: 3@1.attn.
    places = [name.partition(".")[0] for name in trace.coords["reader"].values.tolist()]
    at = {where: [] for where in zip(places, kinds, strict=True)}
    for i, where in enumerate(zip(places, kinds, strict=True)):
        at[where].append(i)
    members = [(at[place, "attn"], at[place, "mlp"]) for place, kind in at if kind == "attn" and (place, "mlp") in at]
    if not members:
        raise TraceError(f"no layer has readers of kinds attn and mlp; the kinds are {', '.join(sorted(set(kinds)))}.")
    attn, mlp = (np.stack([values[:, layer[i]].mean(1) for layer in members], axis=1) for i in range(2))
    return attn, mlp


def _mean(values: np.ndarray, axes: int) -> np.ndarray:
    """Mean over what is known."""
    known = ~np.isnan(values)
    count = known.sum(axes)
    return np.divide(np.where(known, values, 0).sum(axes), count, out=np.full(count.shape, np.nan), where=count > 0)


def _summary(trace: xr.Dataset, values: np.ndarray, drop_first: int, **options: float) -> pd.DataFrame:
    array = labelled(trace, values, ("token", "entry"), "entries", {"long_name": "entries", "units": "1"})
    return summarise(array, drop_first=drop_first, **options)


def _holds(frame: pd.DataFrame) -> bool | None:
    if frame[["low", "high"]].isna().values.any():
        return None
    above = frame.loc[frame["part"].isin(["embedding", "newest"]), "low"] > 0
    return bool(above.all() and (frame.loc[frame["part"] == "between", "high"] < 0).all())
