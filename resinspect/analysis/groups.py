"""Groups of sublayers that read alike: whether there are any, which, and a map of how far apart profiles lie."""

from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr
from sklearn.decomposition import PCA

from resinspect.analysis.clustering import agreement, best_silhouette, gradual, groupings, silhouettes
from resinspect.analysis.inputs import reach
from resinspect.analysis.profiles import Share, distances, embeddings, overlap, unsigned
from resinspect.analysis.summary import LEVEL, by_document, draws
from resinspect.errors import OptionError, TraceError

Of = Literal["reader", "source"]
STABLE = 0.8
_QUARTERS = 4


def profile_groups(
    trace: xr.Dataset,
    *,
    of: Of = "reader",
    share: Share = "magnitude",
    drop_first: int = 0,
    largest: int = 6,
    resamples: int = 100,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Evidence for each number of groups of sublayers with similar profiles.

    A reader's features are the excess of its token-mean profile over uniform reading: of the embedding, and of the
    source at each distance (0 beyond its sources). A source's are, for each quarter of the readers after it, how many
    times a uniform share it has there, minus 1. Groups are Ward's (hierarchical, least variance). A number of groups is
    accepted if its mean silhouette (Rousseeuw 1987) is above what grouping gives where there are no groups, and if
    resampling documents gives the same groups (mean adjusted Rand index of at least 0.8), of which at least two have
    more than one member. Without groups means draws from one Gaussian of the same covariance (profiles that change
    gradually; Liu et al. 2008, SigClust), each with its best silhouette over all numbers.

    Args:
        trace: With what the share needs.
        of: Readers by what they read, or sources (without the embedding) by where they are read.
        share: ``"magnitude"`` or ``"weight"``, as in ``reading_profile``.
        drop_first: Leading tokens of every document to leave out.
        largest: Most groups to try.
        resamples: Of documents, and draws of the null.
        level: ``1 - level`` is the most that ``p`` may be.
        seed: Of both.

    Returns:
        One row per number of ``groups``, from 2: ``silhouette`` (-1 to 1), ``null`` (its ``level`` quantile without
        groups), ``p``, ``stability`` (NaN with one document, and then nothing is
        accepted), ``accepted``, ``members``, ``tokens``, ``documents``. None accepted: no groups.

    Raises:
        TraceError: If there are fewer than four members: readers of at least two sources, sublayers with at least four
            readers after them.
        OptionError: If an option has a value that is not allowed.
    """
    rows, names, size = _features(trace, of, share, drop_first, (resamples, seed))
    numbers = range(2, min(largest, len(names) - 2) + 1)
    found = groupings(rows[0], numbers)
    scores = silhouettes(rows[0], found)
    generator = np.random.default_rng(seed)
    null = np.array([best_silhouette(gradual(rows[0], generator), numbers) for _ in range(resamples)])
    again = [groupings(row, numbers) for row in rows[1:]]
    frame = pd.DataFrame({"groups": list(numbers), "silhouette": scores, "null": np.quantile(null, level)})
    frame["p"] = [(1 + (~(null < score)).sum()) / (1 + resamples) for score in scores]
    frame["stability"] = [agreement(now, [once[i] for once in again]) for i, now in enumerate(found)]
    # One group beside single members is no grouping.
    several = np.array([np.sort(np.bincount(labels))[-2] > 1 for labels in found])
    frame["accepted"] = (frame["p"] <= 1 - level) & (frame["stability"] >= STABLE) & several
    frame = frame.assign(members=len(names), tokens=size[0], documents=size[1])
    frame.attrs = {"of": of, "share": share, "level": level, "stable": STABLE, "drop_first": drop_first}
    return frame


def profile_clusters(
    trace: xr.Dataset,
    *,
    of: Of = "reader",
    share: Share = "magnitude",
    drop_first: int = 0,
    largest: int = 6,
    resamples: int = 100,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Groups of sublayers with similar profiles, or none: the accepted number of `profile_groups` of best silhouette.

    Args:
        trace: With what the share needs.
        of: As in ``profile_groups``.
        share: As in ``profile_groups``.
        drop_first: As in ``profile_groups``.
        largest: As in ``profile_groups``.
        resamples: As in ``profile_groups``.
        level: As in ``profile_groups``.
        seed: As in ``profile_groups``.

    Returns:
        One row per member: ``name``, ``kind``, ``layer``, ``group`` (from 0, in order of first appearance; -1 for all
        if there are no groups). ``attrs``: ``groups`` (their number, 0 for none), and the
        ``silhouette``, ``p`` and ``stability`` of that number, or of the best one that was refused.
        Null value: no groups. Source: own rule, on the silhouette of Rousseeuw 1987.

    Raises:
        TraceError: As ``profile_groups``.
        OptionError: As ``profile_groups``.
    """
    evidence = profile_groups(
        trace, of=of, share=share, drop_first=drop_first, largest=largest, resamples=resamples, level=level, seed=seed
    )
    rows, names, _ = _features(trace, of, share, drop_first, (0, seed))
    accepted = evidence[evidence["accepted"]]
    best = (accepted if len(accepted) else evidence).sort_values("silhouette").iloc[-1]
    groups = int(best["groups"]) if len(accepted) else 0
    labels = groupings(rows[0], [groups])[0] if groups else np.full(len(names), -1)
    order = {label: i for i, label in enumerate(dict.fromkeys(labels.tolist()))}
    frame = _named(trace, of, names).assign(group=[order[label] if groups else -1 for label in labels.tolist()])
    frame.attrs = {**evidence.attrs, "groups": groups, **best[["silhouette", "p", "stability"]].to_dict()}
    return frame


def profile_map(
    trace: xr.Dataset, *, of: Of = "reader", share: Share = "magnitude", drop_first: int = 0
) -> pd.DataFrame:
    """Sublayers in the plane, near each other if their profiles are: first two principal components.

    Of the features of ``profile_groups``, not scaled. Classical multidimensional scaling of their Euclidean distances
    gives the same picture.

    Args:
        trace: With what the share needs.
        of: As in ``profile_groups``.
        share: As in ``profile_groups``.
        drop_first: Leading tokens of every document to leave out.

    Returns:
        One row per member: ``name``, ``kind``, ``layer``, ``x``, ``y`` (in shares).
        ``attrs["explained"]``: parts of the variance that x and y hold; NaN if all profiles are the same.
        Null value: all members in one point. Source: principal component analysis (Pearson 1901).

    Raises:
        TraceError: As ``profile_groups``.
        OptionError: As ``profile_groups``.
    """
    rows, names, size = _features(trace, of, share, drop_first, (0, 0))
    varies = bool(np.ptp(rows[0], axis=0).max() > 1e-12)
    pca = PCA(2, svd_solver="full").fit(rows[0]) if varies else None
    points = pca.transform(rows[0]) if pca else np.zeros((len(names), 2))
    # A component's sign is arbitrary: the point farthest out is on the positive side.
    points = points * np.sign(points[np.abs(points).argmax(0), [0, 1]])
    frame = _named(trace, of, names).assign(x=points[:, 0], y=points[:, 1])
    explained = pca.explained_variance_ratio_.tolist() if pca else [np.nan, np.nan]
    frame.attrs = {"of": of, "share": share, "explained": explained, "tokens": size[0], "documents": size[1]}
    return frame


def _features(
    trace: xr.Dataset, of: str, share: Share, drop_first: int, resampling: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Features ``(1 + resample, member, feature)`` of all documents and of resamples; members; tokens and documents."""
    if of not in ("reader", "source"):
        raise OptionError(f"of is {of!r}; choose reader or source.")
    values = unsigned(trace, share)
    kept = trace.coords["position"].values >= drop_first
    sums, counts = by_document(values[kept].reshape(int(kept.sum()), -1), trace.coords["sample"].values[kept])
    picks = np.ones((1, len(sums)))
    if resampling[0] and len(sums) > 1:
        picks = np.vstack([picks, draws(len(sums), *resampling)])
    total = picks @ counts
    means = np.divide(picks @ sums, total, out=np.full(total.shape, np.nan), where=total > 0)
    excess = np.where(reach(trace), means.reshape(-1, *values.shape[1:]) - 1 / reach(trace).sum(-1)[:, None], 0)
    features = _of_readers(trace, excess) if of == "reader" else _of_sources(trace, excess)
    # Groups of profiles that differ by rounding would be groups all the same.
    features = np.round(features, 9)
    choice = reach(trace).sum(1) > 1 if of == "reader" else (reach(trace).sum(0) >= _QUARTERS) & ~embeddings(trace)
    members = np.flatnonzero(choice & ~np.isnan(features).any((0, 2)))
    if len(members) < 4:
        raise TraceError(
            f"groups need at least four {of}s whose profile is known and not fixed; here are {len(members)}."
        )
    return features[:, members], members, (int(kept.sum()), len(sums))


def _of_readers(trace: xr.Dataset, excess: np.ndarray) -> np.ndarray:
    first = embeddings(trace) & reach(trace)
    distance = np.where(first, 0, distances(trace))
    parts = [(excess * first).sum(-1)] + [
        (excess * (distance == step)).sum(-1) for step in range(1, distance.max() + 1)
    ]
    return np.stack(parts, axis=-1)


def _of_sources(trace: xr.Dataset, excess: np.ndarray) -> np.ndarray:
    times, distance = excess * reach(trace).sum(-1)[:, None], distances(trace)
    features = []
    for source, column in enumerate(distance.T):
        steps = np.unique(column[column > 0])
        at = column[:, None] == steps
        part = overlap(len(steps), _QUARTERS)
        features.append(times[:, :, source] @ (at / at.sum(0)) @ (part / part.sum(0)))
    return np.stack(features, axis=1)


def _named(trace: xr.Dataset, of: str, members: np.ndarray) -> pd.DataFrame:
    labels = {"name": of, "kind": f"{of}_kind", "layer": f"{of}_layer"}
    return pd.DataFrame({column: trace.coords[name].values[members] for column, name in labels.items()})
