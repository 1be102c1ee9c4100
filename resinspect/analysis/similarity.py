"""How alike two models read: profiles of different seeds, checkpoints and models, aligned by relative depth."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import xarray as xr
from scipy.special import xlogy

from resinspect.analysis.inputs import reach
from resinspect.analysis.profiles import Share, embeddings, overlap, unsigned
from resinspect.analysis.summary import LEVEL, by_document, draws
from resinspect.errors import OptionError, TraceError


@dataclass(frozen=True)
class _Side:
    """Mean profiles of one trace, ``(1 + resample, reader, 1 + bin)`` per kind of reader, and the documents behind."""

    profiles: dict[str, np.ndarray]
    uniform: dict[str, np.ndarray]
    documents: int
    text: tuple[bytes, bytes]


def compare(
    traces: Mapping[str, xr.Dataset],
    *,
    share: Share = "magnitude",
    bins: int = 8,
    drop_first: int = 0,
    resamples: int = 300,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """How alike each pair of traces reads: one minus the Jensen-Shannon divergence of profiles, in bits.

    A reader's profile is its share of the embedding, and its shares of all other sources by their relative depth (0 the
    oldest, 1 the newest) in ``bins``. Readers are matched within a kind by relative depth; where counts differ, the
    deeper trace's profiles are interpolated. Views of one sublayer (queries, keys, values) are averaged first, and
    readers of one source are left out.

    Args:
        traces: Name -> trace, at least two: seeds, checkpoints, models, domains.
        share: ``"magnitude"`` or ``"weight"``, as in ``reading_profile``.
        bins: Of relative depth.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents: the same ones of both traces where their tokens are the same.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        One row per pair ``a``, ``b`` and ``kind`` of reader (and ``all``): ``similarity`` (0 to 1, the same), ``low``,
        ``high`` (NaN if either has one document), ``shuffled`` (null value: readers of the same kind at other depths;
        NaN for one reader), ``uniform`` (null value: the lesser of both traces' similarity with uniform reading);
        ``agreement`` (cosine of what both profiles have beyond uniform reading, -1 to 1, null value 0),
        ``agreement_low``, ``agreement_high``; ``readers`` (matched), ``paired`` (the same tokens), ``documents_a``,
        ``documents_b``. Two traces that both read nearly uniformly are similar for that reason alone, hence
        ``agreement``. The intervals are over documents; they say nothing of other seeds.

    Raises:
        TraceError: If a variable is missing, or two traces have no kind of reader in common.
        OptionError: If there are fewer than two traces, or an option has a value that is not allowed.
    """
    if len(traces) < 2:
        raise OptionError(f"compare needs at least two traces by name; here is {len(traces)}.")
    if bins < 1:
        raise OptionError(f"bins is {bins}; at least 1 is needed.")
    sides: dict[str, _Side] = {}
    for name, trace in traces.items():
        same = next((i for i, other in enumerate(sides.values()) if other.text == _text(trace)), len(sides))
        sides[name] = _side(trace, share, bins, drop_first, (resamples, seed + same))
    rows = []
    for a, b in combinations(sides, 2):
        rows += [{"a": a, "b": b, **row} for row in _pair(sides[a], sides[b], level)]
    frame = pd.DataFrame(rows)
    frame.attrs = {"share": share, "bins": bins, "drop_first": drop_first, "level": level}
    return frame


def _pair(a: _Side, b: _Side, level: float) -> list[dict[str, object]]:
    kinds = [kind for kind in a.profiles if kind in b.profiles]
    if not kinds:
        raise TraceError(
            f"the readers are of kinds {', '.join(a.profiles)} and {', '.join(b.profiles)}: none in common."
        )
    matched = {kind: _matched(a, b, kind) for kind in kinds}
    tail, known = [(1 - level) / 2, (1 + level) / 2], min(a.documents, b.documents) > 1
    rows = []
    for kind in ("all", *kinds):
        parts = list(matched.values()) if kind == "all" else [matched[kind]]
        p, q, flat_a, flat_b = (np.concatenate([part[i] for part in parts], axis=1) for i in range(4))
        similar, agreed = _alike(p, q).mean(1), _cosine(p - flat_a, q - flat_b)
        across = np.concatenate([_across(part) for part in parts])
        bounds = [np.quantile(x[1:], tail) if known else [np.nan, np.nan] for x in (similar, agreed)]
        rows.append(
            {
                "kind": kind,
                "similarity": similar[0],
                "low": bounds[0][0],
                "high": bounds[0][1],
                "shuffled": across.mean() if across.size else np.nan,
                "uniform": min(_alike(p[0], flat_a[0]).mean(), _alike(q[0], flat_b[0]).mean()),
                "agreement": agreed[0],
                "agreement_low": bounds[1][0],
                "agreement_high": bounds[1][1],
                "readers": p.shape[1],
                "paired": a.text == b.text,
                "documents_a": a.documents,
                "documents_b": b.documents,
            }
        )
    return rows


def _matched(a: _Side, b: _Side, kind: str) -> list[np.ndarray]:
    """Profiles of both and of uniform reading of both, at the same relative depths."""
    count = min(a.profiles[kind].shape[1], b.profiles[kind].shape[1])
    return [_at_depths(values[kind], count) for values in (a.profiles, b.profiles, a.uniform, b.uniform)]


def _across(matched: list[np.ndarray]) -> np.ndarray:
    """Similarities of readers that are not at the same depth."""
    p, q = matched[0][0], matched[1][0]
    return _alike(p[:, None], q[None])[~np.eye(len(p), dtype=bool)]


def _side(trace: xr.Dataset, share: Share, bins: int, drop_first: int, resampling: tuple[int, int]) -> _Side:
    values = unsigned(trace, share)
    kept = trace.coords["position"].values >= drop_first
    sums, counts = by_document(values[kept].reshape(int(kept.sum()), -1), trace.coords["sample"].values[kept])
    picks = np.ones((1, len(sums)))
    if len(sums) > 1:
        picks = np.vstack([picks, draws(len(sums), *resampling)])
    total = picks @ counts
    means = np.divide(picks @ sums, total, out=np.full(total.shape, np.nan), where=total > 0)
    means = means.reshape(-1, *values.shape[1:])
    flat = (reach(trace) / reach(trace).sum(-1)[:, None])[None]
    return _Side(_binned(trace, means, bins), _binned(trace, flat, bins), len(sums), _text(trace))


def _text(trace: xr.Dataset) -> tuple[bytes, bytes]:
    return tuple(trace.coords[name].values.astype(np.int64).tobytes() for name in ("sample", "token_id"))


def _binned(trace: xr.Dataset, means: np.ndarray, bins: int) -> dict[str, np.ndarray]:
    """Per kind ``(resample, reader, 1 + bin)``: embedding, then bins of relative depth; views averaged."""
    reachable, first = reach(trace), embeddings(trace)
    parts: dict[tuple[str, str], list[np.ndarray]] = {}
    for i, (name, kind) in enumerate(
        zip(trace.coords["reader"].values, trace.coords["reader_kind"].values, strict=True)
    ):
        others = np.flatnonzero(reachable[i] & ~first)
        if len(others) and not np.isnan(means[:, i]).any():
            embedding = means[:, i, reachable[i] & first].sum(-1, keepdims=True)
            spread = means[:, i, others] @ overlap(len(others), bins)
            place = str(name).partition(".")[0]
            parts.setdefault((str(kind), place), []).append(np.concatenate([embedding, spread], axis=1))
    kinds = dict.fromkeys(kind for kind, _ in parts)
    return {
        kind: np.stack([np.mean(views, axis=0) for (k, _), views in parts.items() if k == kind], axis=1)
        for kind in kinds
    }


def _at_depths(profiles: np.ndarray, count: int) -> np.ndarray:
    """Profiles at so many relative depths, linearly between readers."""
    place = np.linspace(0, profiles.shape[1] - 1, count)
    below = np.minimum(place.astype(int), max(profiles.shape[1] - 2, 0))
    above = np.minimum(below + 1, profiles.shape[1] - 1)
    part = (place - below)[:, None]
    return profiles[:, below] * (1 - part) + profiles[:, above] * part


def _alike(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """One minus the Jensen-Shannon divergence over the last dimension."""
    middle = (p + q) / 2
    divergence = (xlogy(p, p) + xlogy(q, q)).sum(-1) / 2 - xlogy(middle, middle).sum(-1)
    return 1 - np.clip(divergence / np.log(2), 0, 1)


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine over readers and bins at once; NaN where there is only rounding."""
    size = np.linalg.norm(a, axis=(1, 2)) * np.linalg.norm(b, axis=(1, 2))
    return np.divide((a * b).sum((1, 2)), size, out=np.full(len(size), np.nan), where=size > 1e-12)
