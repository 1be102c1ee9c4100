"""What the class of a token tells about the source that a reader reads most."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import reach
from resinspect.analysis.profiles import Share, unsigned
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES
from resinspect.analysis.tokens import label_tokens, shuffles, token_classes
from resinspect.errors import OptionError


def class_information(
    trace: xr.Dataset,
    *,
    share: Share = "weight",
    classes: Sequence[str] | xr.DataArray | None = None,
    drop_first: int = 0,
    permutations: int = 50,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Mutual information of the source with the largest share and the class of the token, corrected by shuffling.

    ``I(A; C) = H(A) + H(C) - H(A, C)`` in bits from the counts over all tokens, less its mean when the classes are
    shuffled within documents. The null keeps how often each class and each source is in each document, so what remains
    is neither the bias of the plug-in estimate, which is positive, nor a mere difference between documents. At most
    ``H(A)``; 0 in expectation where the two are independent, and 0 where a reader always reads one source most.

    Args:
        trace: With what the share needs.
        share: ``"weight"`` (the largest ``|W|``) or ``"magnitude"`` (the longest contribution), as in
            ``reading_profile``.
        classes: One label for each token of the trace; by default ``token_classes(trace)``.
        drop_first: Leading tokens of every document to leave out.
        permutations: Of the null.
        resamples: Bootstrap resamples of documents, centred on the value.
        level: Of the intervals, and of ``null_high``.
        seed: Of permutations and resamples.

    Returns:
        One row for each reader: ``information`` (corrected), ``low``, ``high``, ``null_high`` (the upper end of what
        shuffles give, corrected alike), ``plug_in`` and ``null_mean`` (both uncorrected), ``entropy`` (of the source),
        ``classes``, ``tokens``, ``documents``, ``types``. ``all`` is the mean over readers with several sources. A
        token with an unknown share is left out for that reader.
        Source: mutual information (Shannon 1948), less what shuffles give.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share, it is signed, or there is not one class for each token.
    """
    given = token_classes(trace).values if classes is None else np.asarray(classes)
    if given.shape != (trace.sizes["token"],):
        raise OptionError(f"classes has shape {given.shape}; give one label for each of {trace.sizes['token']} tokens.")
    labels = label_tokens(trace, drop_first=drop_first)
    names, kind = np.unique(given[labels.kept].astype(str), return_inverse=True)
    tables = _Tables(unsigned(trace, share)[labels.kept], reach(trace), len(names))
    several = reach(trace).sum(1) > 1
    picks = bootstrap(labels.documents, resamples, seed)
    counts = tables.counts(kind, labels.document, labels.documents)
    resampled = (picks @ counts.reshape(labels.documents, -1)).reshape(len(picks), *counts.shape[1:])
    values = _information(resampled, several)
    whole = np.zeros_like(labels.document)
    null = np.concatenate([
        _information(tables.counts(kind[order], whole, 1), several)
        for order in shuffles(labels.document, permutations, seed)
    ])  # fmt: skip
    low, high = percentiles(values, labels.documents, level, centred=True) - null.mean(0)
    entropy = _entropy(resampled[:1].sum(-1))[0]
    columns = {
        "reader": [*trace.coords["reader"].values.astype(str), "all"],
        "information": values[0] - null.mean(0),
        "low": low,
        "high": high,
        "plug_in": values[0],
        "null_mean": null.mean(0),
        "null_high": np.quantile(null, level, axis=0) - null.mean(0),
        "entropy": [*entropy, entropy[several].mean()],
        "classes": len(names),
    }
    tokens = tables.known.sum(0)
    frame = pd.DataFrame({**columns, **labels.counts(), "tokens": np.append(tokens, tokens.max())})
    frame.attrs = {"measure": "class_information", "units": "bit", "share": share}
    frame.attrs |= {"drop_first": drop_first, "level": level}
    return frame


class _Tables:
    """Contingency tables of each reader's largest source and the class of the token."""

    def __init__(self, size: np.ndarray, can_read: np.ndarray, classes: int) -> None:
        readers, sources = can_read.shape
        self.shape = readers, sources, classes
        self.known = ~np.isnan(size).any(-1)
        source = np.where(can_read, np.nan_to_num(size), -1).argmax(-1)
        self.cell = ((np.arange(readers) * sources + source) * classes)[self.known]

    def counts(self, kind: np.ndarray, document: np.ndarray, documents: int) -> np.ndarray:
        """``(document, reader, source, class)``."""
        cells = int(np.prod(self.shape))
        shift = np.broadcast_to((document * cells + kind)[:, None], self.known.shape)[self.known]
        return np.bincount(shift + self.cell, minlength=documents * cells).reshape(documents, *self.shape)


def _information(counts: np.ndarray, several: np.ndarray) -> np.ndarray:
    """Plug-in information in bits ``(row, reader)`` of ``(row, reader, source, class)``, and the mean over readers."""
    joint = _entropy(counts.reshape(*counts.shape[:2], -1))
    values = np.maximum(_entropy(counts.sum(-1)) + _entropy(counts.sum(-2)) - joint, 0)
    return np.column_stack([values, values[:, several].mean(1)])


def _entropy(counts: np.ndarray) -> np.ndarray:
    """In bits, over the last dimension."""
    total = counts.sum(-1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros(counts.shape), where=total > 0)
    return 0.0 - (share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(-1)
