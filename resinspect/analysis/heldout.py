"""How much of a table of values the labels of its rows predict in documents that the predictor has not seen.

Parts come in order, each on what the ones before left over: the mean, position, token type, domain, document. All but
the last are fitted on other documents. The mean of a label is shrunk by how well it carries over (empirical Bayes): the
covariance of its sums in different folds of documents over that plus the noise of such a sum, both from the training
folds alone. Noise is measured between folds, so that tokens of one document are not taken for independent ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from resinspect.analysis.shrinkage import carried, ratio, shifts_of, shrunk
from resinspect.analysis.tokens import Labels, indicator, shuffles


@dataclass(frozen=True)
class Parts:
    """Squared errors and by how much each part lowers them, all summed over the entries of a group (such as a reader).

    Attributes:
        names: Of the parts, in order.
        base: ``(document, group)``, around one mean for each group.
        gain: ``(part, document, group)``.
        null: ``(part, permutation, group)``: the gain with permuted labels over all documents, NaN for the mean.
        size: ``(group,)``, the sum of squares itself.
        fitted_base: ``(group,)`` and
        fitted: ``(part, group)``: the same fitted and scored on all documents, without shrinkage.
    """

    names: tuple[str, ...]
    base: np.ndarray
    gain: np.ndarray
    null: np.ndarray
    size: np.ndarray
    fitted_base: np.ndarray
    fitted: np.ndarray

    def of(self, group: int) -> "Parts":
        """Of one group, without that dimension."""
        return Parts(self.names, **{name: values[..., group] for name, values in self._arrays().items()})

    def total(self) -> "Parts":
        """Summed over groups, without that dimension."""
        return Parts(self.names, **{name: values.sum(-1) for name, values in self._arrays().items()})

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(self.names, **{name: values + getattr(other, name) for name, values in self._arrays().items()})

    def _arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}


def held_out_parts(
    table: np.ndarray, group: np.ndarray, labels: Labels, *, folds: int, permutations: int, seed: int
) -> Parts:
    """Parts of ``(token, entry)``, entries in groups numbered from 0, for the tokens of ``labels``."""
    names = ("static", "position", "token", *(() if labels.domain is None else ("domain",)), "document")
    groups = np.eye(int(group.max()) + 1)[group]
    size, *fitted = (table**2).sum(0) @ groups, *in_sample(table, groups, labels, names)
    present = np.unique(labels.document)
    if len(present) < 2:
        gain, null = (np.full((len(names), n, groups.shape[1]), np.nan) for n in (labels.documents, permutations))
        return Parts(names, gain[0], gain, null, size, *fitted)
    fold_of = np.full(labels.documents, -1)
    fold_of[present] = np.random.default_rng(seed).permutation(len(present)) % folds
    ladder = _Ladder(table, groups, labels, fold_of)
    errors, null = [ladder.errors()], [np.full((permutations, groups.shape[1]), np.nan)]
    ladder.take_means()
    errors.append(ladder.errors())
    for number, name in enumerate(names[1:]):
        null.append(np.stack(list(getattr(ladder, name)(permutations, seed + number))))
        errors.append(ladder.errors())
    return Parts(names, errors[0], -np.diff(np.stack(errors), axis=0), np.stack(null), size, *fitted)


def in_sample(
    table: np.ndarray, groups: np.ndarray, labels: Labels, names: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Squared error around one mean for each group, and what the means of each part's labels in turn lower it by."""
    domain = None if labels.domain is None else labels.domain[labels.document]
    every = {
        "static": np.zeros_like(labels.kind),
        "position": labels.place,
        "token": labels.kind,
        "domain": domain,
        "document": labels.document,
    }
    rest = table - (table.mean(0) @ groups / groups.sum(0)) @ groups.T
    errors = [(rest**2).sum(0) @ groups]
    for name in names:
        cells = indicator(every[name], int(every[name].max()) + 1)
        means = (cells @ rest) / np.maximum(cells.sum(1), 1)[:, None]
        rest = rest - means[every[name]]
        errors.append((rest**2).sum(0) @ groups)
    return errors[0], -np.diff(np.stack(errors), axis=0)


class _Ladder:
    """Held-out residuals of each token, lowered part by part.

    Each step yields the gains under permuted labels, then takes the part that the true labels explain. The predictor of
    a fold is fitted on the others; ``model`` is its mean for each position bin, ``effect`` what it adds for each type.
    """

    def __init__(self, table: np.ndarray, groups: np.ndarray, labels: Labels, fold_of: np.ndarray) -> None:
        self.table, self.groups, self.labels = table, groups, labels
        self.fold_of, self.folds = fold_of, int(fold_of.max()) + 1
        self.fold = self.fold_of[labels.document]
        self.places = int(labels.place.max()) + 1
        self.kind = _shared(labels.kind, self.fold)
        self.kinds = int(self.kind.max()) + 1
        self.by_document = indicator(labels.document, labels.documents)
        sums, counts = self._sums(table, np.zeros_like(self.fold), 1)[:, 0], self._counts(np.zeros_like(self.fold), 1)
        self.mean = (sums.sum(0) - sums) / (counts.sum() - counts)
        base = (self.mean @ self.groups / self.groups.sum(0)) @ self.groups.T
        self.residual = table - base[self.fold]

    def errors(self) -> np.ndarray:
        return self.by_document @ (self.residual**2 @ self.groups)

    def take_means(self) -> None:
        self.residual = self.table - self.mean[self.fold]

    def position(self, permutations: int, seed: int) -> Iterator[np.ndarray]:
        """Position bins; the null permutes positions within documents."""
        place, centre = self.labels.place, self.mean.mean(0)
        rest, counts = self.table - centre, self._counts(place, self.places)
        shifts = shifts_of(counts[:, :, None], (self.mean - centre)[:, None])
        for order in shuffles(self.labels.document, permutations, seed):
            yield carried(self._sums(rest, place[order], self.places), counts, shifts)[1] @ self.groups
        effect, _ = carried(self._sums(rest, place, self.places), counts, shifts)
        self.residual -= effect[self.fold, place]
        self.model = self.mean[:, None] + effect

    def token(self, permutations: int, seed: int) -> Iterator[np.ndarray]:
        """Token types; the null permutes them within documents and position bins, which keeps every count as it is."""
        kind, place, centre = self.kind, self.labels.place, self.model.mean(0)
        rest, counts = self.table - centre[place], self._counts(kind, self.kinds)
        cells = self._counts(kind * self.places + place, self.kinds * self.places)
        shifts = shifts_of(cells.reshape(self.folds, self.kinds, self.places), self.model - centre)
        for order in shuffles(self.labels.places(), permutations, seed):
            yield carried(self._sums(rest, kind[order], self.kinds), counts, shifts)[1] @ self.groups
        self.effect, _ = carried(self._sums(rest, kind, self.kinds), counts, shifts)
        self.residual -= self.effect[self.fold, kind]

    def domain(self, permutations: int, seed: int) -> Iterator[np.ndarray]:
        """Domain of the document; the null permutes domains over documents."""
        left, lengths = self._left_in_documents(), np.bincount(self.labels.document, minlength=self.labels.documents)
        domain = self.labels.domain
        for order in shuffles(np.zeros(len(domain), dtype=np.int64), permutations, seed):
            yield self._domain_effect(left, lengths, domain[order])[1] @ self.groups
        effect, _ = self._domain_effect(left, lengths, domain)
        self.residual -= effect[self.fold, domain[self.labels.document]]

    def document(self, permutations: int, seed: int) -> Iterator[np.ndarray]:
        """The document itself: each half is predicted from the other; the null pairs halves of different documents."""
        documents, document, half = self.labels.documents, self.labels.document, self.labels.half
        sums = np.stack([indicator(document[half == h], documents) @ self.residual[half == h] for h in (0, 1)])
        counts = np.stack([np.bincount(document[half == h], minlength=documents) for h in (0, 1)])
        for order in shuffles(np.zeros(documents, dtype=np.int64), permutations, seed):
            other = [np.stack([values[0][order], values[1]]) for values in (sums, counts)]
            yield self._half_effects(*other)[1] @ self.groups
        effect, _ = self._half_effects(sums, counts)
        self.residual -= effect[half, document]

    def _sums(self, values: np.ndarray, label: np.ndarray, size: int) -> np.ndarray:
        """``(fold, label, entry)``."""
        return (indicator(self.fold * size + label, self.folds * size) @ values).reshape(self.folds, size, -1)

    def _counts(self, label: np.ndarray, size: int) -> np.ndarray:
        cells = np.bincount(self.fold * size + label, minlength=self.folds * size)
        return cells.reshape(self.folds, size).astype(np.float64)

    def _left_in_documents(self) -> np.ndarray:
        """``(fold, document, entry)``: sums of what each fold's predictor so far leaves over."""
        document, documents = self.labels.document, self.labels.documents
        places, kinds = indicator(self.labels.place, self.places), indicator(self.kind, self.kinds)
        place_counts, kind_counts = self.by_document @ places.T, self.by_document @ kinds.T
        sums = indicator(document, documents) @ self.table
        return np.stack([
            sums - place_counts @ model - kind_counts @ effect
            for model, effect in zip(self.model, self.effect, strict=True)
        ])  # fmt: skip

    def _domain_effect(
        self, left: np.ndarray, lengths: np.ndarray, domain: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        size = int(domain.max()) + 1
        # Documents without a token have no fold, and nothing to add to any.
        cells = indicator(np.maximum(self.fold_of, 0) * size + domain, self.folds * size)
        counts = (cells @ lengths).reshape(self.folds, size)
        sums = np.stack([(cells @ rest).reshape(self.folds, size, -1) for rest in left])
        centre = sums.mean(0)
        own = np.arange(self.folds)
        moved = centre - sums
        shifts = np.stack([moved.sum(1) - moved[own, own], moved[own, own]], axis=1)
        return carried(centre, counts, shifts)

    def _half_effects(self, sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(half, document, entry)`` effects and the gain of each entry, shrunk by what other folds' halves share."""
        counts = counts.astype(np.float64)
        once = 1 / np.maximum(counts.sum(0), 1)
        products, squares = (sums[0] * sums[1]) * once[:, None], (sums**2).sum(0) * once[:, None]
        pairs, lengths = counts.prod(0) * once, (counts**2).sum(0) * once
        effects = np.empty_like(sums)
        for k in range(self.folds):
            train, test = (self.fold_of != k) & (self.fold_of >= 0), self.fold_of == k
            shared = np.maximum(ratio(products[train].sum(0), pairs[train].sum()), 0)
            noise = np.maximum(squares[train].sum(0) - shared * lengths[train].sum(), 0) / train.sum()
            for h in (0, 1):
                effects[h, test] = shrunk(sums[1 - h, test], counts[1 - h, test], shared, noise)
        gain = effects * (2 * sums - counts[:, :, None] * effects)
        return effects, gain.sum((0, 1))


def _shared(kind: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Types numbered from 1; 0 for all those of one fold only, whose own mean can predict nothing."""
    kinds, cells = int(kind.max()) + 1, np.unique(np.stack([kind, fold]), axis=1)[0]
    several = np.bincount(cells, minlength=kinds) > 1
    return np.where(several, np.cumsum(several), 0)[kind]
