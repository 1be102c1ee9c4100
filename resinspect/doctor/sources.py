"""Checks of what is read from where."""

from collections.abc import Iterator

import numpy as np

from resinspect.analysis.inputs import contribution_norms, require
from resinspect.doctor.patient import Patient
from resinspect.doctor.rows import NotApplicable, Row, listed, tokens_of
from resinspect.doctor.values import FEWEST

TAKES = 0.95
CONTAINS = (0.5, 1.5)
ALIKE = 0.7
DISCARDED = 0.1


def dominant_source(patient: Patient) -> Iterator[Row]:
    """Readers at which one source is the largest on almost all tokens, by ``|W| ||v||``.

    Threshold: more than 95 % of tokens, at readers of two or more sources (with one it is guaranteed). A note: being
    largest is common and may be learned, but then the argmax varies too little for statistics over its values. It is a
    finding where that source also holds more than 95 % of the sum over sources (median token) at a reader of four or
    more: practically nothing else is read there. Needs 20 tokens.
    """
    trace = patient.trace
    if trace.sizes["token"] < FEWEST:
        raise NotApplicable(f"{trace.sizes['token']} tokens are too few; it needs {FEWEST}")
    size = contribution_norms(trace)
    readers, sources = (trace.coords[name].values for name in ("reader", "source"))
    prefix = trace.coords["reader_prefix"].values
    largest, only, looked_at, top = [], [], 0, (0.0, "")
    for r in np.flatnonzero(prefix > 1):
        part = size[:, r, : prefix[r]]
        part = part[np.isfinite(part).all(-1) & (part.sum(-1) > 0)]
        if len(part) < FEWEST:
            continue
        looked_at += 1
        counts = np.bincount(part.argmax(-1), minlength=prefix[r]) / len(part)
        source = int(counts.argmax())
        share = float(np.median(part[:, source] / part.sum(-1)))
        said = f"{readers[r]} from {sources[source]} ({counts[source]:.0%} of tokens, median share {share:.0%})"
        top = max(top, (float(counts[source]), said))
        if counts[source] > TAKES:
            (only if share > TAKES and prefix[r] > 3 else largest).append((float(counts[source]), said, readers[r]))
    if not looked_at:
        raise NotApplicable("no reader of two or more sources has known weights at enough tokens")
    limit = f"largest at > {TAKES:.0%} of tokens"
    rows = (
        ("finding", only, f"{limit}, with a share > {TAKES:.0%}", "Practically nothing else is read there."),
        ("note", largest, limit, "The argmax source is nearly a constant there: statistics of it have little to say."),
    )
    for severity, found, threshold, consequence in rows:
        if found:
            examples = "; ".join(said for _, said, _ in sorted(found, reverse=True, key=lambda item: item[0])[:3])
            yield Row(
                severity,
                f"{len(found)} of {looked_at} readers of two or more sources, such as {examples}; {tokens_of(trace)}",
                listed(name for _, _, name in found),
                max(share for share, _, _ in found),
                trace.sizes["token"],
                threshold,
                consequence,
            )
    if not largest and not only:
        yield Row("ok", f"at most {top[1]}; {tokens_of(trace)}", "", top[0], trace.sizes["token"], limit)


def cumulative_sources(patient: Patient) -> Iterator[Row]:
    """Sources that are states, not writes: later ones contain earlier ones.

    A source contains the one before it (or before that, where two modules of a layer differ) if, in the median over
    tokens, its part along the other is about once the other (a coefficient of 0.5 to 1.5, exactly 1 for a sum) and the
    cosine is above 0.7 (what a sum of two equal orthogonal parts gives). Threshold: half of all sources. Writes of
    trained models have cosines well below.
    """
    trace = patient.trace
    count = trace.sizes["source"]
    if count < 3:
        raise NotApplicable("fewer than three sources")
    (gram,) = require(trace, "gram")
    norm = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    contained, cosines = np.zeros(count, dtype=bool), np.zeros(count)
    for lag in (1, 2):
        inner = np.diagonal(gram, offset=lag, axis1=1, axis2=2)
        with np.errstate(invalid="ignore", divide="ignore"):
            along = np.nanmedian(inner / norm[:, :-lag] ** 2, axis=0)
            cosine = np.nanmedian(inner / (norm[:, :-lag] * norm[:, lag:]), axis=0)
        contained[lag:] |= (along > CONTAINS[0]) & (along < CONTAINS[1]) & (cosine > ALIKE - 1e-6)
        cosines[lag:] = np.fmax(cosines[lag:], cosine)
    share = float(contained[1:].mean())
    evidence = (
        f"{int(contained.sum())} of {count - 1} sources contain the one or two before; median cosine with it "
        f"{np.nanmedian(cosines[1:]):.2f}; {tokens_of(trace)}"
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
