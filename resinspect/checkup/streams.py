"""Checks of parallel streams: mixing that is not what it promises, that never mixes, or that leaves one stream."""

from collections.abc import Iterator

import numpy as np

from resinspect.analysis.mixing import fixed, stream_mixing, structure
from resinspect.analysis.stream_routing import stream_specificity
from resinspect.analysis.streams import second_singular_value, stream_deviation
from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, listed, tokens_of
from resinspect.trace import EPS

EXACT = 1e-4
NEARLY = 0.05
IDENTITY = 1e-6
ONE = 1e-3
FORGOTTEN = 0.01


def mixing_sums(patient: Patient) -> Iterator[Row]:
    """Mixing that is not stochastic where the scheme says so: both row and column sums.

    Sinkhorn-Knopp norms one of the two last, whose sums are 1 up to rounding and the eps of its divisions. Threshold
    there: 1e-4, or 4 roundings in half precision. The others are as near to 1 as the iterations came; beyond 5 %
    (largest over tokens) it is a finding, since over L sublayers it can grow to ``1.05^L``. A weight below ``-1e-4`` is
    one as well.
    """
    _need_streams(patient)
    promises = structure(patient.trace)
    if not promises & {"rows", "columns"} or "unmixed" in promises:
        why = "streams are never mixed" if "unmixed" in promises else "the scheme promises no sums of rows or columns"
        raise NotApplicable(why)
    for sums in ("rows", "columns"):
        exact = sums in promises
        deviation = stream_deviation(patient.trace, sums=sums)
        rounding = 4 * EPS[patient.trace.attrs["dtype"]]
        limit, values = max(EXACT if exact else NEARLY, rounding), deviation.values
        if np.isnan(values).all():
            raise NotApplicable("no mixing is finite")
        worst = np.nanmax(values, axis=0)
        evidence = (
            f"sums of {sums} miss 1 by up to {np.nanmax(values):.2g} (median {np.nanmedian(values):.2g}); "
            f"{tokens_of(patient.trace)}"
        )
        sites, at = deviation.coords["site"].values, worst > limit
        if not at.any():
            yield Row("ok", evidence, "", float(np.nanmax(worst)), values.size, f"> {limit:.2g}")
            continue
        why = (
            "The scheme norms these sums last, so its mixing is not what it says: another convention, or not applied."
            if exact
            else "Sinkhorn-Knopp has not converged there: mixing loses or gains part of what streams hold."
        )
        where = listed(sites[at], of=len(sites), what="sublayers")
        yield Row("finding", evidence, where, float(np.nanmax(worst)), values.size, f"> {limit:.2g}", why)
    yield from _negative(patient)


def _negative(patient: Patient) -> Iterator[Row]:
    mixing = stream_mixing(patient.trace)
    least = np.nanmin(mixing.values, axis=(0, 2, 3))
    if "nonnegative" in structure(patient.trace) and (least < -EXACT).any():
        yield Row(
            "finding",
            f"smallest weight {least.min():.2g}; {tokens_of(patient.trace)}",
            listed(mixing.coords["site"].values[least < -EXACT]),
            float(least.min()),
            mixing.size,
            f"< -{EXACT}",
            "The scheme has no weight below 0, so its mixing is not what it says.",
        )


def frozen_mixing(patient: Patient) -> Iterator[Row]:
    """Mixing that is the identity on all tokens, and, where there is a model, whether its logits get a gradient.

    Threshold: ``max |M - 1| <= 1e-6`` on all tokens, rounding in float32. Hyper-connections start there
    and get a gradient; a saturated Sinkhorn-Knopp or softmax gets none: with a sensitivity ``max |dM / d parameter|``
    below 1e-6, a step of 1 moves no weight by more than rounding.
    """
    _need_streams(patient)
    if reason := fixed(patient.trace, "unmixed"):
        raise NotApplicable(reason)
    mixing = stream_mixing(patient.trace)
    off = np.abs(mixing.values - np.eye(mixing.shape[-1])).max((2, 3))
    if np.isnan(off).all():
        raise NotApplicable("no mixing is finite")
    off = np.nanmax(off, axis=0)
    sites = mixing.coords["site"].values
    threshold, tokens = f"max |M - 1| <= {IDENTITY:.1g} on all tokens", patient.trace.sizes["token"]
    at = off <= IDENTITY
    if not at.any():
        evidence = f"max |M - 1| is {np.nanmin(off):.2g} or more at each of {len(sites)} sublayers"
        yield Row("ok", f"{evidence}; {tokens_of(patient.trace)}", "", float(np.nanmin(off)), tokens, threshold)
        return
    gradient, consequence = _sensitivity(patient, [str(site) for site in sites[at]])
    yield Row(
        "finding",
        f"max |M - 1| is {off[at].max():.2g} or less at {int(at.sum())} of {len(sites)} sublayers; "
        f"{tokens_of(patient.trace)}; {gradient}",
        listed(sites[at], of=len(sites), what="sublayers"),
        float(off[at].max()),
        tokens,
        threshold,
        consequence,
    )


def _sensitivity(patient: Patient, sites: list[str]) -> tuple[str, str]:
    plain = "Streams are not mixed at these sublayers: each keeps its own sum"
    if patient.model is None or "native_mix" not in patient.trace:
        return "whether a gradient could change it needs the model", f"{plain}."
    from resinspect.checkup.probes import sensitivity

    moves = sensitivity(patient, "mix", [patient.sites.index(site) for site in sites])
    said = f"max |dM / d parameter| is {moves:.2g}"
    if moves <= IDENTITY:
        return said, f"{plain}, and no gradient reaches the logits of mixing, so that training cannot change it."
    return said, f"{plain}; a gradient passes, so training can change it: it is untrained, or was not loaded."


def collapsed_streams(patient: Patient) -> Iterator[Row]:
    """Streams that hold the same, so that n of them act as one gated residual.

    Value: the stream specificity ``|W_r - (sum pre_r)(sum post) / n| / |W_r|`` over writes. Threshold: below 0.001 on
    all tokens at all readers is a finding. Two notes beside it: sublayers whose own mixing has a second singular value
    below 0.001 on all tokens, after which all streams are equal; and a product of all mixing whose median second
    singular value is below 0.01, so that readers at the end cannot tell in which stream early writes were put
    (products of doubly stochastic matrices tend there; the pace is the model's).
    """
    _need_streams(patient)
    trace, tokens = patient.trace, patient.trace.sizes["token"]
    specific = stream_specificity(trace).values
    if np.isnan(specific).all():
        raise NotApplicable("W follows from no streams at any reader with a write to read")
    most, typical = float(np.nanmax(specific)), float(np.nanmedian(specific))
    evidence = f"stream specificity up to {most:.2g}, median {typical:.2g}; {tokens_of(trace)}"
    known = int(np.isfinite(specific).sum())
    limit = f"stream specificity < {ONE} everywhere"
    if most < ONE:
        consequence = "All readers read as if there were a single stream: the others add nothing."
        yield Row("finding", evidence, "all readers", most, known, limit, consequence)
    else:
        yield Row("ok", evidence, "", most, known, limit)
    if structure(trace) >= {"unmixed"}:
        return
    single = second_singular_value(trace)
    if np.isnan(single.values).all():
        return
    sites, at = single.coords["site"].values, np.nanmax(single.values, axis=0) < ONE
    if at.any():
        yield Row(
            "note",
            f"second singular value of M up to {np.nanmax(single.values[:, at]):.2g}; {tokens_of(trace)}",
            listed(sites[at], of=len(sites), what="sublayers"),
            float(np.nanmax(single.values[:, at])),
            tokens,
            f"< {ONE} on all tokens",
            "Mixing leaves all streams equal up to a factor there: what was in which stream is lost.",
        )
    last = (
        second_singular_value(trace, span="from_start").values[:, -1] if "native_mix" in trace else np.full(1, np.nan)
    )
    if np.nanmedian(last) < FORGOTTEN:
        yield Row(
            "note",
            f"second singular value of the product of all M is {np.nanmedian(last):.2g} (median); {tokens_of(trace)}",
            str(sites[-1]),
            float(np.nanmedian(last)),
            tokens,
            f"< {FORGOTTEN}",
            "The last readers cannot tell in which stream the first writes were put.",
        )


def _need_streams(patient: Patient) -> None:
    if not {"native_mix", "native_predict"} & set(patient.trace.data_vars) and not structure(patient.trace):
        raise NotApplicable("no mixing of streams in this trace")
