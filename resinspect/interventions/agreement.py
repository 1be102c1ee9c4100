"""Is a routing weight a causal effect? Rank agreement of weights and shares with what ablating an edge does."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from scipy.stats import rankdata
from torch import nn
from transformers import PreTrainedTokenizerBase

from resinspect.analysis.dilution import contribution_share, magnitude_share
from resinspect.analysis.inputs import labelled, reach, weights
from resinspect.analysis.profiles import Share
from resinspect.analysis.summary import LEVEL, RESAMPLES, by_document, draws, summarise
from resinspect.anatomy import Anatomy
from resinspect.errors import OptionError
from resinspect.hooks.capture import capture
from resinspect.hooks.prompts import Prompts
from resinspect.interventions.edits import ablate_edge
from resinspect.interventions.effects import MEASURES, measure
from resinspect.interventions.session import DOWNSTREAM, Downstream, session

Edge = tuple[int, int]


def absolute_weight(trace: xr.Dataset) -> xr.DataArray:
    """``|W|`` itself ``(token, reader, source)``, not divided by the sum over sources; NaN beyond them."""
    values = np.where(reach(trace), np.abs(weights(trace)), np.nan)
    attrs = {"long_name": "absolute routing weight", "units": "1"}
    return labelled(trace, values, ("token", "reader", "source"), "absolute_weight", attrs)


SHARES = {"contribution": contribution_share, "magnitude": magnitude_share, "weight": absolute_weight}


class RoutingVsCausal(NamedTuple):
    """Two tidy tables.

    Attributes:
        edges: One row per downstream mode and edge: its mean shares and its mean effects with intervals.
        agreement: One row per downstream mode, share, effect and reader (``"all"`` pools the edges of all): ``rho``
            with ``low`` and ``high``, ``edges``, ``documents``.
    """

    edges: pd.DataFrame
    agreement: pd.DataFrame


def routing_vs_causal(
    model: nn.Module,
    prompts: Prompts,
    *,
    share: Sequence[Share] = ("contribution", "magnitude"),
    downstream: Downstream | Sequence[Downstream] = DOWNSTREAM,
    edges: int | None = None,
    seed: int = 0,
    drop_first: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    truncate: bool = False,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> RoutingVsCausal:
    """Rank agreement between how much a reader gets from a source and how much predictions depend on it.

    Every edge (source to reader) is ablated on its own. Its share is the mean over tokens of ``contribution_share``
    (signed), ``magnitude_share`` or ``absolute_weight`` (``|W|`` itself: the routing mass of an edge, whatever the
    length of the write) in the clean run; its effect the mean ``loss_change`` or ``kl``. Spearman's rho is taken over
    the edges of each reader, and over all: there, ``|W|`` also compares readers that weigh their sources differently.
    The interval resamples documents, shares and effects together;
    resampling adds noise to both rankings, so it leans towards smaller values than rho itself.

    Args:
        model: A model of a known family.
        prompts: As for ``capture``.
        share: What to rank edges by, one or more of ``"contribution"``, ``"magnitude"``, ``"weight"``.
        downstream: Modes to run, as for ``intervene``.
        edges: Ablate only so many, drawn at random; None for all. Each takes one forward pass per mode.
        seed: Of that draw, and of the bootstrap.
        drop_first: Leading tokens of every document to leave out.
        tokenizer: Encodes texts.
        batch_size: Prompts per forward pass.
        truncate: Cut prompts that are longer than the model's context.
        resamples: Bootstrap resamples.
        level: Of the interval.

    Returns:
        The two tables. rho lies between -1 and 1, NaN with fewer than 3 edges or where all are alike; null value 0.

    Raises:
        CaptureError: If a reader cannot be edited.
        OptionError: If ``edges`` is below 3, or there is no such share.
    """
    if not share or any(name not in SHARES for name in share):
        raise OptionError(f"share is {share!r}; choose one or more of {', '.join(SHARES)}, as a list.")
    modes = (downstream,) if isinstance(downstream, str) else tuple(downstream)
    if not modes or not {*modes} <= {*DOWNSTREAM}:
        raise OptionError(f"downstream is {downstream!r}; choose one or both of {', '.join(DOWNSTREAM)}.")
    given = session(model, prompts, tokenizer=tokenizer, batch_size=batch_size, truncate=truncate)
    chosen = _chosen(given.layout.anatomy, edges, seed)
    trace = capture(
        model, prompts, tokenizer=tokenizer, batch_size=batch_size, truncate=truncate, keep=("cross",), method="replay"
    )
    ranked = [SHARES[name](trace) for name in dict.fromkeys(share)]
    shares = {str(values.name): _of_edges(values, chosen) for values in ranked}
    edits = [ablate_edge(*_named(given.layout.anatomy, edge)) for edge in chosen]
    options = {"drop_first": drop_first, "resamples": resamples, "level": level, "seed": seed}
    tables, agreement = [], []
    for mode in modes:
        result = measure(given, edits, mode)
        done = {name: result[name].drop_vars("edit").rename(edit="edge") for name in MEASURES if name in result}
        labels = pd.DataFrame([_named(given.layout.anatomy, edge) for edge in chosen], columns=["source", "reader"])
        tables.append(_table(labels.assign(downstream=mode), shares, done, options))
        agreement.append(_agreement(labels["reader"], shares, done, options).assign(downstream=mode))
    first = ["downstream", "reader"]
    frames = [pd.concat(parts, ignore_index=True) for parts in (tables, agreement)]
    return RoutingVsCausal(*(frame[[*first, *frame.columns.difference(first, sort=False)]] for frame in frames))


def _chosen(anatomy: Anatomy, count: int | None, seed: int) -> list[Edge]:
    every = [(s, r) for r, reader in enumerate(anatomy.readers) for s in range(reader.prefix)]
    if count is None or count >= len(every):
        return every
    if count < 3:
        raise OptionError(f"edges is {count}; ranks need at least 3.")
    picked = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[i] for i in sorted(picked)]


def _named(anatomy: Anatomy, edge: Edge) -> tuple[str, str]:
    source, reader = edge
    return anatomy.sources[source].name, anatomy.readers[reader].name


def _of_edges(values: xr.DataArray, edges: Sequence[Edge]) -> xr.DataArray:
    """``(token, reader, source)`` as ``(edge, token)``."""
    array = values.transpose("reader", "source", "token").values
    coords = {name: values.coords[name] for name in ("sample", "position")}
    sources, readers = np.transpose(edges)
    return xr.DataArray(array[readers, sources], coords, ("edge", "token"), values.name)


def _table(labels: pd.DataFrame, shares: dict, done: dict, options: dict[str, Any]) -> pd.DataFrame:
    columns = dict(labels)
    for name, values in (shares | done).items():
        summary = summarise(values, **options)
        columns |= {name: summary["mean"], f"{name}_low": summary["low"], f"{name}_high": summary["high"]}
    return pd.DataFrame(columns).assign(tokens=summary["tokens"], documents=summary["documents"])


def _agreement(readers: pd.Series, shares: dict, done: dict, options: dict[str, Any]) -> pd.DataFrame:
    means = {name: _resampled(values, options) for name, values in (shares | done).items()}
    documents = len(np.unique(next(iter(done.values())).coords["sample"].values))
    tail = (1 - options["level"]) / 2
    rows = []
    for share in shares:
        for effect in done:
            for reader, mine in _groups(readers):
                rho = spearman(means[share][:, mine], means[effect][:, mine])
                low, high = np.nanquantile(rho[1:], [tail, 1 - tail]) if _known(rho, documents) else (np.nan, np.nan)
                rows.append((reader, share, effect, rho[0], low, high, len(mine), documents))
    return pd.DataFrame(rows, columns=["reader", "share", "effect", "rho", "low", "high", "edges", "documents"])


def _known(rho: np.ndarray, documents: int) -> bool:
    return documents > 1 and bool(np.isfinite(rho[1:]).any())


def _groups(readers: pd.Series) -> Iterator[tuple[str, np.ndarray]]:
    yield "all", np.arange(len(readers))
    for reader in dict.fromkeys(readers):
        yield reader, np.flatnonzero(readers == reader)


def _resampled(values: xr.DataArray, options: dict[str, Any]) -> np.ndarray:
    """Mean of each edge over all documents, then over each resample of them: ``(1 + resamples, edge)``."""
    kept = values.transpose("token", "edge").isel(token=values.coords["position"].values >= options["drop_first"])
    sums, counts = by_document(kept.values.astype(np.float64), kept.coords["sample"].values)
    picks = np.concatenate([np.ones((1, len(sums))), draws(len(sums), options["resamples"], options["seed"])])
    with np.errstate(invalid="ignore"):
        return (picks @ sums) / (picks @ counts)


def spearman(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Rank correlation along the last axis; NaN with fewer than 3 values, or where all are alike."""
    if one.shape[-1] < 3:
        return np.full(one.shape[:-1], np.nan)
    a, b = (rankdata(values, axis=-1, nan_policy="propagate") for values in (one, other))
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (a, b))
    size = np.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return np.divide((a * b).sum(-1), size, out=np.full(size.shape, np.nan), where=size > 0)
