"""Ward's groups of a few rows, how well apart they are, and what draws without groups look like."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import adjusted_rand_score


def groupings(rows: np.ndarray, numbers: Iterable[int]) -> list[np.ndarray]:
    """Labels of the rows for each number of groups."""
    tree = linkage(rows, "ward")
    return [fcluster(tree, number, "maxclust") for number in numbers]


def silhouettes(rows: np.ndarray, labels: list[np.ndarray]) -> np.ndarray:
    """Mean silhouette of each grouping; NaN for one group. scikit-learn's takes ten times as long on so few members."""
    apart, scores = squareform(pdist(rows)), []
    for grouping in labels:
        _, which, size = np.unique(grouping, return_inverse=True, return_counts=True)
        if len(size) < 2:
            scores.append(np.nan)
            continue
        own = which[:, None] == np.arange(len(size))
        total = apart @ own
        within = total[own] / np.maximum(size[which] - 1, 1)
        nearest = np.where(own, np.inf, total / size).min(1)
        wider = np.maximum(within, nearest)
        score = np.divide(nearest - within, wider, out=np.zeros_like(wider), where=(size[which] > 1) & (wider > 0))
        scores.append(score.mean())
    return np.array(scores)


def agreement(grouping: np.ndarray, others: list[np.ndarray]) -> float:
    """Mean adjusted Rand index; most resamples give one of a few groupings, which is compared once."""
    times = Counter(tuple(other.tolist()) for other in others)
    scores = [adjusted_rand_score(grouping, other) for other in times]
    return float(np.average(scores, weights=list(times.values()))) if scores else np.nan


def best_silhouette(rows: np.ndarray, numbers: Iterable[int]) -> float:
    """The largest over all numbers of groups; -1 if there are none to be had."""
    return float(np.nanmax(silhouettes(rows, groupings(rows, numbers)), initial=-1.0))


def gradual(rows: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """As many draws from one Gaussian with the covariance of the rows."""
    draw = generator.standard_normal((len(rows), len(rows)))
    return draw @ (rows - rows.mean(0)) / np.sqrt(len(rows) - 1)
