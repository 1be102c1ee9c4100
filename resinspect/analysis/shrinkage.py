"""Means of labels that predict documents held out: shrunk by how well they carry over (empirical Bayes)."""

import numpy as np


def carried(sums: np.ndarray, counts: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Effects of labels on held-out folds, and what they gain.

    Args:
        sums: ``(fold, label, entry)``, centred over all folds: the shrinkage is taken from these.
        counts: ``(fold, label)``.
        shifts: ``(fold, 2, label, entry)``: what to take from the sums of the training folds, and of the fold itself,
            so that they are centred by the training folds alone.

    Returns:
        Effects ``(fold, label, entry)`` and by how much they lower the squared error, ``(entry,)``.
    """
    total, squares, n_all, n_squares = sums.sum(0), (sums**2).sum(0), counts.sum(0), (counts**2).sum(0)
    effects, gain = np.empty_like(sums), np.zeros(sums.shape[-1])
    for k in range(len(sums)):
        train, n = total - sums[k], n_all - counts[k]
        square, n_square = squares - sums[k] ** 2, n_squares - counts[k] ** 2
        once = 1 / np.maximum(n, 1)
        shared = np.maximum(ratio(once @ (train**2 - square), once @ (n**2 - n_square)), 0)
        noise = np.maximum(once @ square - shared * (once @ n_square), 0) / max((n > 0).sum(), 1)
        effects[k] = shrunk(train - shifts[k, 0], n, shared, noise)
        gain += (effects[k] * (2 * (sums[k] - shifts[k, 1]) - counts[k][:, None] * effects[k])).sum(0)
    return effects, gain


def shrunk(sums: np.ndarray, counts: np.ndarray, shared: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """``(label, entry)`` of ``sum shared / (n shared + noise)``: a label's mean, drawn to 0 as far as it is noise."""
    below = counts[:, None] * shared + noise
    return np.divide(sums * shared, below, out=np.zeros_like(sums), where=below > 0)


def shifts_of(counts: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """``counts (fold, label, place) @ moved (fold, place, entry)`` over the training folds and over the fold itself."""
    total = counts.sum(0)
    return np.stack([np.stack([(total - counts[k]) @ moved[k], counts[k] @ moved[k]]) for k in range(len(counts))])


def ratio(above: np.ndarray, below: float) -> np.ndarray:
    """``above / below``, 0 where there is nothing below."""
    return above / below if below > 0 else np.zeros_like(above)
