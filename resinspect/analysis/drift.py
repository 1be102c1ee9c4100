"""How far a reader's profile of sources moves between tokens, documents and domains."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import reach
from resinspect.analysis.profiles import Share, unsigned
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES
from resinspect.analysis.tokens import indicator, label_tokens, shuffles


def routing_drift(
    trace: xr.Dataset,
    *,
    share: Share = "weight",
    domains: Mapping[int, str] | None = None,
    drop_first: int = 0,
    permutations: int = 20,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Generalised Jensen-Shannon divergence of a reader's profiles between tokens, documents and domains.

    ``H(mean profile) - sum_g w_g H(profile of g)`` in bits, w the group's share of tokens (Lin 1991, section V): the
    information that token, document or domain gives on the source, if that were drawn from the profile. 0 where all
    profiles are equal, at most 1 between two groups and log2 of the number of sources between many; documents refine
    domains and tokens documents, so that the three are nested. A scheme of static weights gives 0 by construction.

    Args:
        trace: With what the share needs.
        share: Whose profiles: ``"weight"`` or ``"magnitude"``, as in ``reading_profile``.
        domains: Domain of each document (``sample``).
        drop_first: Leading tokens of every document to leave out.
        permutations: For the null: profiles over documents within position bins; domains over documents.
        resamples: Bootstrap resamples of documents, centred on the value.
        level: Of the intervals, and of ``null_high``.
        seed: Of permutations and resamples.

    Returns:
        Rows reader x ``between``: ``divergence`` (bits), ``low``, ``high``, ``null_mean``, ``null_high`` (what groups
        of these sizes give by chance, which is above 0: a document is a finite sample; NaN for tokens, whose profiles
        have no sampling error, so that their null is 0), ``share`` (divergence over ``H(mean profile)``, 0 to 1),
        ``groups``, ``tokens``, ``documents``, ``types``. ``all`` is the mean over readers with several sources. A token
        with an unknown share is left out for that reader.

    Raises:
        TraceError: If a variable is missing.
        OptionError: If there is no such share, or it is signed; if ``domains`` lacks a document.
    """
    labels = label_tokens(trace, drop_first=drop_first, domains=domains)
    profiles = _Profiles(unsigned(trace, share)[labels.kept], reach(trace))
    picks, once = bootstrap(labels.documents, resamples, seed), np.ones((1, labels.documents))
    documents = profiles.sums(labels.document, labels.documents)
    null = [
        profiles.sums(labels.document[order], labels.documents).between_documents(once)
        for order in shuffles(labels.place, permutations, seed)
    ]
    found = [
        ("tokens", len(labels.document), documents.information(picks, documents.uncertainty), None),
        ("documents", labels.documents, documents.between_documents(picks), null),
    ]
    if (domain := labels.domain) is not None:
        orders = shuffles(np.zeros_like(domain), permutations, seed)
        null = [documents.between_groups(domain[order], once) for order in orders]
        found.append(("domains", int(domain.max()) + 1, documents.between_groups(domain, picks), null))
    several = reach(trace).sum(1) > 1
    entropy = documents.information(once, np.zeros_like(documents.counts))
    frames = []
    for between, groups, values, null in found:
        values, spread = _with_mean(values, several), _with_mean(entropy, several)[0]
        chance = np.full((1, len(spread)), np.nan) if null is None else _with_mean(np.concatenate(null), several)
        low, high = percentiles(values, labels.documents, level, centred=True)
        columns = {
            "reader": [*trace.coords["reader"].values.astype(str), "all"],
            "between": between,
            "divergence": values[0],
            "low": low,
            "high": high,
            "null_mean": chance.mean(0),
            "null_high": np.quantile(chance, level, axis=0),
            "share": np.divide(values[0], spread, out=np.full_like(spread, np.nan), where=spread > 0),
            "groups": groups,
        }
        known = documents.counts.sum(0)
        tokens = np.append(known, known.max()).astype(np.int64)
        frames.append(pd.DataFrame({**columns, **labels.counts(), "tokens": tokens}))
    frame = pd.concat(frames, ignore_index=True)
    frame.attrs = {"measure": "routing_drift", "units": "bit", "share": share, "drop_first": drop_first}
    return frame


@dataclass(frozen=True)
class _Sums:
    """Sums over the tokens of each document.

    Attributes:
        profile: ``(document, pair of reader and source)``.
        counts: ``(document, reader)``, tokens whose profile is known.
        uncertainty: ``(document, reader)``, entropies of the tokens' profiles.
        pairs: ``(pair, reader)``, 1 where the pair is the reader's.
    """

    profile: np.ndarray
    counts: np.ndarray
    uncertainty: np.ndarray
    pairs: np.ndarray

    def information(self, picks: np.ndarray, within: np.ndarray) -> np.ndarray:
        """Entropy of the mean profile less the mean of ``within``, sums for each document: ``(pick, reader)``."""
        total = picks @ self.counts
        values = _entropy(picks @ self.profile, total, self.pairs) - _over(picks @ within, total)
        return np.maximum(values, 0)

    def between_documents(self, picks: np.ndarray) -> np.ndarray:
        """Divergence between documents."""
        return self.information(picks, self.counts * _entropy(self.profile, self.counts, self.pairs))

    def between_groups(self, group: np.ndarray, picks: np.ndarray) -> np.ndarray:
        """Divergence between groups of documents."""
        total = picks @ self.counts
        values = _entropy(picks @ self.profile, total, self.pairs)
        for g in range(int(group.max()) + 1):
            taken, sums, counts = picks[:, group == g], self.profile[group == g], self.counts[group == g]
            own = taken @ counts
            values -= _over(own, total) * _entropy(taken @ sums, own, self.pairs)
        return np.maximum(values, 0)


class _Profiles:
    """Profiles ``(token, pair of reader and source)``, 0 where a reader's is not known."""

    def __init__(self, shares: np.ndarray, can_read: np.ndarray) -> None:
        reader, source = np.nonzero(can_read)
        self.pairs = np.eye(len(can_read))[reader]
        self.known = (~np.isnan(shares).any(-1)).astype(np.float64)
        self.profile = np.where(self.known[:, reader] > 0, shares[:, reader, source], 0)
        self.uncertainty = _entropy(self.profile, self.known, self.pairs)

    def sums(self, document: np.ndarray, documents: int) -> _Sums:
        cells = indicator(document, documents)
        return _Sums(*(cells @ values for values in (self.profile, self.known, self.uncertainty)), self.pairs)


def _entropy(sums: np.ndarray, counts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Entropy in bits of ``sums / counts`` over the sources of each reader: ``(row, reader)``."""
    share = _over(sums, counts @ pairs.T)
    return 0.0 - (share * np.log2(share, out=np.zeros_like(share), where=share > 0)) @ pairs


def _over(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(above.shape), where=below > 0)


def _with_mean(values: np.ndarray, several: np.ndarray) -> np.ndarray:
    """Values of readers, and as a last column their mean over the readers with several sources."""
    return np.column_stack([values, values[:, several].mean(1)])
