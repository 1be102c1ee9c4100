"""Checks of what is read from where."""

from collections.abc import Iterator

import numpy as np

from resinspect.analysis.inputs import contribution_norms, require
from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, listed, tokens_of
from resinspect.checkup.values import FEWEST

TAKES = 0.95
CONTAINS = (0.5, 1.5)
ALIKE = 0.57
DISCARDED = 0.1


def dominant_source(patient: Patient) -> Iterator[Row]:
    """Readers at which one source is the largest on almost all tokens, by ``|W| ||v||``.

    Threshold: more than 95 % of tokens, at readers of two or more sources (with one it is guaranteed). A note: it is
    common at the first readers and may be what was learned, but then the argmax over sources says little more than the
    name of that source. Needs 20 tokens.
    """
    trace = patient.trace
    readers, prefix = trace.coords["reader"].values, trace.coords["reader_prefix"].values
    size, found = contribution_norms(trace), []
    for r in np.flatnonzero(prefix > 1):
        part = size[:, r, : prefix[r]]
        part = part[np.isfinite(part).all(-1) & (part.sum(-1) > 0)]
        if len(part) < FEWEST:
            continue
        counts = np.bincount(part.argmax(-1), minlength=prefix[r]) / len(part)
        source = int(counts.argmax())
        share = np.median(part[:, source] / part.sum(-1))
        name = trace.coords["source"].values[source]
        said = f"{readers[r]} from {name} ({counts[source]:.0%} of tokens, median share {share:.0%})"
        found.append((float(counts[source]), said, readers[r]))
    if not found:
        raise NotApplicable(f"no reader of two or more sources has known weights at {FEWEST} tokens")
    found.sort(key=lambda item: -item[0])
    taken = [item for item in found if item[0] > TAKES]
    value, said, _ = found[0]
    tokens, limit = trace.sizes["token"], f"largest at > {TAKES:.0%} of tokens"
    if not taken:
        yield Row("ok", f"most is {said}; {tokens_of(trace)}", "", value, tokens, limit)
        return
    examples = "; ".join(said for _, said, _ in taken[:3])
    yield Row(
        "note",
        f"{len(taken)} of {len(found)} readers of two or more sources, such as {examples}; {tokens_of(trace)}",
        listed(reader for _, _, reader in taken),
        value,
        tokens,
        limit,
        "The argmax source is nearly a constant there: statistics of it have little to say.",
    )


def cumulative_sources(patient: Patient) -> Iterator[Row]:
    """Sources that are states, not writes: later ones contain earlier ones.

    A source contains the one before it (or before that, where two modules of a layer differ) if, in the median over
    tokens, its part along the other is about once the other (a coefficient of 0.5 to 1.5, exactly 1 for a sum) and the
    cosine is above 0.57 (a sum of three equal orthogonal parts has 0.577 with one of them). Threshold: half of all
    sources. Writes of the bundled models have a median cosine of 0.15 to 0.20 with the one before.
    """
    trace = patient.trace
    count = trace.sizes["source"]
    if count < 3:
        raise NotApplicable("fewer than three sources")
    (gram,) = require(trace, "gram")
    norm = np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0))
    contained, cosines = np.zeros(count, dtype=bool), np.zeros(count)
    for lag in (1, 2):
        inner = np.diagonal(gram, offset=lag, axis1=1, axis2=2)
        along = np.median(_ratio(inner, norm[:, :-lag] ** 2), axis=0)
        cosine = np.median(_ratio(inner, norm[:, :-lag] * norm[:, lag:]), axis=0)
        contained[lag:] |= (along > CONTAINS[0]) & (along < CONTAINS[1]) & (cosine > ALIKE)
        cosines[lag:] = np.fmax(cosines[lag:], cosine)
    share = float(contained[1:].mean())
    evidence = (
        f"{int(contained.sum())} of {count - 1} sources contain the one or two before; median cosine with it "
        f"{np.median(cosines[1:]):.2f}; {tokens_of(trace)}"
    )
    if share < 0.5:
        yield Row("ok", evidence, "", share, trace.sizes["token"], ">= half of the sources")
        return
    yield Row(
        "finding",
        evidence,
        listed(trace.coords["source"].values[contained]),
        share,
        trace.sizes["token"],
        ">= half of the sources",
        "What was named as writes are running states: W then reads the newest only, and shares of sources count the "
        "same write many times; name the modules whose output is added to the residual.",
    )


def discarded(patient: Patient) -> Iterator[Row]:
    """How much of what is read a scalar W does not say, where the scheme weighs channels or norms the carry.

    Value: per reader the median over tokens of ``sqrt(sum_s (discarded_s |c_s|)^2 / sum_s |c_s|^2)``, c the
    contribution. Threshold: 10 %, where the scalar weight still gives 99.5 % of each contribution's length
    (``sqrt(1 - 0.1^2)``). A note: the contributions themselves are exact.
    """
    trace = patient.trace
    if "discarded" not in trace:
        raise NotApplicable("W is one scalar per source here; it discards nothing")
    part, size = np.nan_to_num(require(trace, "discarded")[0]), np.nan_to_num(contribution_norms(trace))
    total = (size**2).sum(-1)
    lost = np.sqrt(((part * size) ** 2).sum(-1) / np.where(total > 0, total, 1))
    typical = np.median(lost, axis=0)
    readers = trace.coords["reader"].values
    worst = int(typical.argmax())
    evidence = f"up to {typical[worst]:.1%} at {readers[worst]} (median token); {tokens_of(trace)}"
    over = typical > DISCARDED
    if not over.any():
        yield Row("ok", evidence, readers[worst], float(typical[worst]), len(lost), f"> {DISCARDED:.0%}")
        return
    yield Row(
        "note",
        evidence,
        listed(readers[over], of=len(readers), what="readers"),
        float(typical[worst]),
        len(lost),
        f"> {DISCARDED:.0%}",
        "W is only the best scalar there; use contributions (shares, norms), which are exact, and not W alone.",
    )


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """0 where there is nothing to divide by: a source of length 0 contains and is contained in nothing."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0)
