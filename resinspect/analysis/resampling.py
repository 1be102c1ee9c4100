"""Bootstrap over documents of statistics that are no plain means."""

import numpy as np

from resinspect.analysis.summary import draws


def bootstrap(documents: int, resamples: int, seed: int) -> np.ndarray:
    """How often each document is taken: ``(1 + resamples, document)``; the first row takes each once."""
    return np.vstack([np.ones((1, documents)), draws(documents, resamples, seed)])


def percentiles(values: np.ndarray, documents: int, level: float, *, centred: bool = False) -> np.ndarray:
    """Bounds ``(2, ...)`` of a statistic computed for each row of ``bootstrap``; NaN for fewer than two documents.

    Args:
        values: ``(1 + resamples, ...)``.
        documents: How many were resampled.
        level: Of the interval.
        centred: Move the resampled values so that their mean is the value itself: for statistics that repeated
            documents bias, such as divergences and information.
    """
    if documents < 2:
        return np.full((2, *values.shape[1:]), np.nan)
    resampled = values[1:] - (values[1:].mean(0) - values[0] if centred else 0)
    tail = [(1 - level) / 2, (1 + level) / 2]
    infinite = np.isinf(resampled).any(0)
    # Between a finite and an infinite value there is none to interpolate.
    nearest = np.quantile(resampled, tail, axis=0, method="nearest")
    return np.where(infinite, nearest, np.quantile(np.where(infinite, 0.0, resampled), tail, axis=0))
