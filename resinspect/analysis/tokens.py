"""What is known of a token beside its routing: document, position, type, class, domain; and their shuffles."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import xarray as xr
from scipy.sparse import csr_array

from resinspect.errors import OptionError

CLASSES = ("first", "whitespace", "digit", "punctuation", "word start", "continuation")
# Marks that tokenizers of the sentencepiece and byte-level kinds write for a leading space.
SPACE_MARKS = "[\u2581\u0120]"


@dataclass(frozen=True)
class Labels:
    """Labels of the kept tokens as integers from 0.

    Attributes:
        kept: Which tokens of the trace are kept.
        document: Document of each kept token.
        position: Position of each in its document.
        place: Position bin of each: ``floor(log2(position + 1))``, so that a bin is twice as long as the one before.
        kind: Token type of each.
        half: 0 or 1, the half of its document.
        documents: How many documents there are.
        domain: Domain of each document, None if there are none.
    """

    kept: np.ndarray
    document: np.ndarray
    position: np.ndarray
    place: np.ndarray
    kind: np.ndarray
    half: np.ndarray
    documents: int
    domain: np.ndarray | None

    def of(self, used: np.ndarray) -> "Labels":
        """Labels of some of the kept tokens, documents and types numbered as before."""
        names = ("document", "position", "place", "kind", "half")
        return replace(self, **{name: getattr(self, name)[used] for name in names})

    def counts(self) -> dict[str, int]:
        """How much there is: tokens, documents, types."""
        return {
            "tokens": len(self.document),
            "documents": len(np.unique(self.document)),
            "types": len(np.unique(self.kind)),
        }

    def places(self) -> np.ndarray:
        """One number for each pair of document and position bin: what shuffles of token types stay within."""
        return self.document * (int(self.place.max(initial=0)) + 1) + self.place


def label_tokens(trace: xr.Dataset, *, drop_first: int = 0, domains: Mapping[int, str] | None = None) -> Labels:
    """Labels of the tokens of a trace from position ``drop_first`` of every document on.

    Raises:
        OptionError: If no token is left, or ``domains`` lacks a document.
    """
    kept = trace.coords["position"].values >= drop_first
    if not kept.any():
        raise OptionError(f"drop_first is {drop_first}, which leaves no token; the longest document is shorter.")
    samples, document = np.unique(trace.coords["sample"].values[kept], return_inverse=True)
    position = trace.coords["position"].values[kept].astype(np.int64)
    first, last = np.full(len(samples), position.max()), np.zeros(len(samples), dtype=np.int64)
    np.minimum.at(first, document, position)
    np.maximum.at(last, document, position)
    return Labels(
        kept=kept,
        document=document,
        position=position,
        place=np.log2(position + 1).astype(np.int64),
        kind=np.unique(trace.coords["token_id"].values[kept], return_inverse=True)[1],
        half=(2 * position > (first + last)[document]).astype(np.int64),
        documents=len(samples),
        domain=None if domains is None else _domains(samples, domains),
    )


def token_classes(trace: xr.Dataset) -> xr.DataArray:
    """Class of each token by its text and the text before it.

    ``first``: the first of a document. ``whitespace``: nothing else. ``digit``: has one. ``punctuation``: no letter or
    digit. ``word start``: a leading space, or what comes before does not end in a letter or digit. ``continuation``:
    the rest.

    Args:
        trace: Any.

    Returns:
        ``(token,)`` of strings.
    """
    text = pd.Series(trace.coords["text"].values.astype(object)).str.replace(SPACE_MARKS, " ", regex=True)
    before = text.shift(fill_value=" ").str[-1:].str.fullmatch(r"[^\W_]").to_numpy(bool)
    rules = [
        trace.coords["position"].values == 0,
        (text.str.strip() == "").to_numpy(bool),
        text.str.contains(r"\d").to_numpy(bool),
        ~text.str.contains(r"[^\W_]").to_numpy(bool),
        text.str.match(r"\s").to_numpy(bool) | ~before,
    ]
    values = np.select(rules, CLASSES[:-1], CLASSES[-1])
    attrs = {"long_name": "token class", "units": "1"}
    coords = {name: coord for name, coord in trace.coords.items() if coord.dims == ("token",)}
    return xr.DataArray(values, coords, ("token",), "token_class", attrs)


def shuffles(groups: np.ndarray, count: int, seed: int) -> Iterator[np.ndarray]:
    """``count`` random orders of the tokens in which each stays in its group."""
    generator = np.random.default_rng(seed)
    home = np.argsort(groups, kind="stable")
    for _ in range(count):
        order = np.empty(len(groups), dtype=np.int64)
        order[home] = np.argsort(groups + generator.random(len(groups)))
        yield order


def indicator(labels: np.ndarray, size: int) -> csr_array:
    """``(label, token)`` with 1 where a token has the label; times a table, it sums the table by label."""
    return csr_array((np.ones(len(labels)), (labels, np.arange(len(labels)))), shape=(size, len(labels)))


def _domains(samples: np.ndarray, domains: Mapping[int, str]) -> np.ndarray:
    missing = [int(sample) for sample in samples if int(sample) not in domains]
    if missing:
        raise OptionError(f"domains has no label for {len(missing)} of {len(samples)} documents, such as {missing[0]}.")
    return np.unique([str(domains[int(sample)]) for sample in samples], return_inverse=True)[1]
