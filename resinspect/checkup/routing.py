"""Checks of routing weights against what their scheme promises, and against how they start."""

from collections.abc import Iterator

import numpy as np

from resinspect.analysis.inputs import weights
from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, listed, tokens_of
from resinspect.checkup.schemes import SOFTMAX, softmaxes
from resinspect.trace import EPS

UNIFORM = 1e-3


def uniform_routing(patient: Patient) -> Iterator[Row]:
    """Depth attention that still is the plain mean: queries that have not learned, or were not loaded.

    Value: ``max |n alpha - 1|`` over tokens and the n slots of a read; reads of a single slot are left out, where 1 is
    guaranteed. Threshold: 0.001 on all tokens (4 roundings in half precision), which are scores less than 0.001 apart;
    zero queries give rounding, and the queries of bundled models at least 0.8 on some token.
    """
    limit = _even(patient)
    found, tokens = [], 0
    for place, alpha in softmaxes(patient):
        if alpha.shape[1] > 1 and len(alpha):
            found.append((place, float(np.abs(alpha.shape[1] * alpha - 1).max())))
            tokens = max(tokens, len(alpha))
    if not found:
        raise NotApplicable("no read of two or more slots has known weights")
    places = [place for place, value in found if value < limit]
    threshold = f"max |n alpha - 1| < {limit:.2g}"
    if not places:
        least = min(found, key=lambda item: item[1])
        said = f"max |n alpha - 1| is {least[1]:.2g} or more at each of {len(found)} reads, least at {least[0]}"
        yield Row("ok", f"{said}; {tokens_of(patient.trace)}", "", least[1], tokens, threshold)
        return
    worst = max(value for place, value in found if place in places)
    yield Row(
        "finding",
        f"max |n alpha - 1| is {worst:.2g} or less on all tokens at {len(places)} of {len(found)} reads; "
        f"{tokens_of(patient.trace)}",
        listed(places, of=len(found), what="reads of two or more slots"),
        worst,
        tokens,
        threshold,
        "These reads are the plain mean of what came before: their queries have not learned, or were not loaded.",
    )


def equal_weights(patient: Patient) -> Iterator[Row]:
    """A scheme with routing of its own that routes nothing: every reader takes all its sources at one weight.

    Value: ``(max W - min W) / max |W|`` over the sources of a reader, its maximum over tokens and readers of two or
    more sources. Threshold: 0.001, or 4 roundings in half precision. That is how DenseFormer, hyper-connections and
    others start: as the plain residual.
    """
    if patient.scheme in SOFTMAX:
        raise NotApplicable("a softmax over depth; see uniform routing")
    if patient.layout is not None and not patient.layout.routing:
        raise NotApplicable("no parameter routes here: weights are fixed by the architecture")
    if patient.layout is None and not any(str(name).startswith("native_") for name in patient.trace.data_vars):
        raise NotApplicable("the trace holds no natives: weights are fixed by the architecture, or were not kept")
    trace = patient.trace
    weight, prefix = weights(trace), trace.coords["reader_prefix"].values
    gaps = []
    for r in np.flatnonzero(prefix > 1):
        row = weight[:, r, : prefix[r]]
        row = row[np.isfinite(row).all(-1)]
        size = np.abs(row).max(-1)
        gaps += [float((np.ptp(row, axis=-1)[size > 0] / size[size > 0]).max(initial=0.0))] if len(row) else []
    if not gaps:
        raise NotApplicable("no reader of two or more sources has known weights")
    limit = _even(patient)
    threshold = f"(max W - min W) / max |W| < {limit:.2g} everywhere"
    evidence = f"(max W - min W) / max |W| up to {max(gaps):.2g} over {len(gaps)} readers; {tokens_of(trace)}"
    if max(gaps) >= limit:
        yield Row("ok", evidence, "", max(gaps), trace.sizes["token"], threshold)
        return
    yield Row(
        "finding",
        evidence,
        "all readers",
        max(gaps),
        trace.sizes["token"],
        threshold,
        "The scheme acts as the plain residual: its routing has not learned, was not loaded, or is not applied.",
    )


def _even(patient: Patient) -> float:
    """Below this share, weights are equal: half precision cannot hold 1 / n exactly."""
    return max(UNIFORM, 4 * EPS[patient.trace.attrs["dtype"]])


def softmax_sums(patient: Patient) -> Iterator[Row]:
    """Depth attention whose weights do not sum to 1, or are negative.

    Threshold: ``|sum alpha - 1|`` above 4 n eps (and at least 1e-5), the rounding of n weights in the model's dtype; or
    a weight below 0.
    """
    eps = EPS[patient.trace.attrs["dtype"]]
    found, worst, count = [], (0.0, ""), 0
    for place, alpha in softmaxes(patient):
        if not len(alpha):
            continue
        off = float(np.abs(alpha.sum(1) - 1).max())
        count, worst = count + 1, max(worst, (off, place))
        if off > max(1e-5, 4 * alpha.shape[1] * eps) or (alpha < 0).any():
            found.append(place)
    if not count:
        raise NotApplicable("no softmax has finite weights")
    evidence = f"max |sum alpha - 1| is {worst[0]:.2g} over {count} reads; {tokens_of(patient.trace)}"
    tokens, limit = patient.trace.sizes["token"], "rounding of the sum (at least 1e-5), or a weight below 0"
    row = Row("ok", evidence, "", worst[0], tokens, limit)
    why = "These reads are no averages: the weights were changed after the softmax, or are not those of the scheme."
    yield row.found(listed(found, of=count, what="reads"), why) if found else row
