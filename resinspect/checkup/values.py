"""Checks of the map itself and of the sizes in it."""

from collections.abc import Iterator

import numpy as np
import xarray as xr

from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, Severity, at_token, listed, tokens_of
from resinspect.trace import EPS, verdict

_BLOCK = 4096
FALLS = 0.25
FEWEST = 20
"""Tokens below which a share of tokens, or of a mean, says nothing."""


def fidelity(patient: Patient) -> Iterator[Row]:
    """Does W reconstruct what readers read? The trace's own verdict per reader.

    Threshold: the rounding bound ``c eps kappa sqrt(S)`` of ``ri.verdict``; a reader beyond it at any token is off (a
    finding). An error that rounding explains but that is above 2 % is unknown (a note): a wrong map could hide there.
    Where errors are off only because they are not finite, the map may be right; the finding says so.
    """
    trace = patient.trace
    errors, bound = trace["fidelity"].values.astype(np.float64), _bound(patient)
    over = np.where(bound > 0, errors / np.where(bound > 0, bound, 1), np.where(errors > 0, np.inf, 0.0))
    words = verdict(trace).values.astype(object)
    words[(words == "off") & ~(np.isfinite(over) & (over > 1)).any(0)] = "not finite"
    fitted = "; W was fitted to these very vectors (solve)" if trace.attrs["method"] == "solve" else ""
    readers = trace.coords["reader"].values
    for word, (severity, threshold, consequence) in _VERDICTS.items():
        at = words == word
        if not at.any():
            continue
        known = np.isfinite(over[:, at])
        worst, times = (x[:, at][known].max(initial=0.0) for x in (errors, over))
        evidence = f"relative error up to {worst:.2g}, {times:.2g} of what rounding explains; {tokens_of(trace)}"
        if not known.all():
            evidence += f"; none known or finite at {int((~known).sum())} of {known.size} places"
        if word in ("off", "not finite") and patient.refused:
            evidence += f"; capture says: {patient.refused.rstrip('.')}"
        where = listed(readers[at], of=len(readers), what="readers")
        yield Row(severity, evidence + fitted, where, float(times), int(known.sum()), threshold, consequence)


_VERDICTS: dict[str, tuple[Severity, str, str]] = {
    "off": (
        "finding",
        "more than rounding explains (1)",
        "W is not what the model did at these readers; nothing computed from it there can be used.",
    ),
    "not finite": (
        "finding",
        "not finite",
        "Whether W is right at these readers cannot be told where values are not finite.",
    ),
    "unknown": (
        "note",
        "above 2 %, or none known",
        "W may be right at these readers, but this run cannot show it.",
    ),
    "exact": ("ok", "more than rounding explains (1)", ""),
}


def _bound(patient: Patient) -> np.ndarray:
    trace = patient.trace
    count = trace.coords["reader_terms" if "reader_terms" in trace.coords else "reader_prefix"].values
    kappa = trace["kappa"].values.astype(np.float64)
    return trace.attrs["tolerance"] * EPS[trace.attrs["dtype"]] * kappa * np.sqrt(np.maximum(count, 1))


def non_finite(patient: Patient) -> Iterator[Row]:
    """Values that are NaN or infinite, named at the first place in execution order and its first token.

    Threshold: a single one. NaN where the convention gives it a meaning (a source beyond reach, a weight that is not
    identifiable, the loss of a last token) is not counted; inf always is.
    """
    trace = patient.trace
    places: list[tuple[int, str, np.ndarray]] = []
    prefix = trace.coords["reader_prefix"].values
    for what, order in (("source", 2 * np.arange(trace.sizes["source"])), ("reader", 2 * prefix - 1)):
        bad = ~np.isfinite(trace[f"{what}_norm"].values)
        names = trace.coords[what].values
        places += [(int(order[i]), f"{what} {names[i]}", bad[:, i]) for i in np.flatnonzero(bad.any(0))]
    places.sort(key=lambda place: place[0])
    for _, name, bad in places[:1]:
        first = int(np.argmax(bad))
        yield Row(
            "finding",
            f"norm of {name} is not finite at {int(bad.sum())} of {tokens_of(trace)}, first at "
            f"{at_token(trace, first)}; {len(places)} sources and readers in all",
            f"{name}, {at_token(trace, first)}",
            float(bad.sum()),
            int(bad.size),
            "any",
            "Everything that reads this is NaN or infinite too; look at this place first.",
        )
    others = [str(name) for name, values in trace.data_vars.items() if _infinite(values)]
    if others and not places:
        yield Row(
            "finding",
            f"infinite values in {', '.join(others)}; {tokens_of(trace)}",
            listed(others),
            float(len(others)),
            len(trace.data_vars),
            "any",
            "Means over these variables are infinite.",
        )
    if not places and not others:
        yield Row("ok", f"no norm is NaN and no value infinite; {tokens_of(trace)}", n=trace.sizes["token"])


def _infinite(values: xr.DataArray) -> bool:
    """Read in blocks: a lazily opened trace may hold more than memory."""
    if values.dtype.kind != "f":
        return False
    starts = range(0, values.sizes.get("token", 1), _BLOCK)
    blocks = (values.isel(token=slice(i, i + _BLOCK)) if "token" in values.dims else values for i in starts)
    return any(bool(np.isinf(block.values).any()) for block in blocks)


def zero_sources(patient: Patient) -> Iterator[Row]:
    """Sources that write nothing.

    Threshold: a norm of exactly 0. On all tokens it is a finding, but a note for the sources that a scheme adds as
    biases, which start at zero; on some tokens it is a note.
    """
    trace = patient.trace
    zero = trace["source_norm"].values == 0
    names, kinds = trace.coords["source"].values, trace.coords["source_kind"].values
    always = zero.all(0)
    bias = np.array(["bias" in str(kind) for kind in kinds])
    some = zero.any(0) & ~always
    said = (
        ("finding", always & ~bias, "every token", "These sublayers add nothing, so no weight on them has a meaning."),
        (
            "note",
            always & bias,
            "every token",
            "These biases are zero, as at initialisation; weights on them are idle.",
        ),
        ("note", some, "some tokens", "Shares and cosines of these sources are 0 or undefined at those tokens."),
    )
    for severity, at, when, consequence in said:
        if at.any():
            count = f"at most {int(zero[:, at].sum(0).max())} of {tokens_of(trace)}"
            yield Row(
                severity,
                f"norm is 0 at {when} ({tokens_of(trace) if when == 'every token' else count})",
                listed(names[at]),
                float(zero[:, at].mean(0).max()),
                len(zero),
                "norm 0",
                consequence,
            )
    if not zero.any():
        smallest = float(np.nanmin(trace["source_norm"].values))
        yield Row("ok", f"smallest norm {smallest:.2g}; {tokens_of(trace)}", value=smallest, n=int(zero.size))


def extreme_tokens(patient: Patient) -> Iterator[Row]:
    """Few tokens of extreme norm that decide a mean over tokens.

    Value: by how much the mean norm falls when the 1 % of tokens with the largest norm (at least one) are left out.
    Threshold: a quarter, which with 1 % of tokens needs norms about 33 times those of the others: a mean that so few
    tokens move by so much does not describe the rest. A note, since such tokens (attention sinks) are common in healthy
    models; which of them are first tokens is said.
    """
    trace = patient.trace
    tokens = trace.sizes["token"]
    if tokens < FEWEST:
        raise NotApplicable(f"{tokens} tokens are too few; it needs {FEWEST}")
    top = -(-tokens // 100)
    first = trace.coords["position"].values == 0
    falls, places, at_start = [], [], []
    for what in ("reader", "source"):
        norm = np.nan_to_num(trace[f"{what}_norm"].values.astype(np.float64), posinf=0.0)
        order = np.argpartition(norm, tokens - top, axis=0)[tokens - top :]
        total = norm.sum(0)
        rest = (total - np.take_along_axis(norm, order, 0).sum(0)) / (tokens - top)
        falls += np.where(total > 0, 1 - rest * tokens / np.where(total > 0, total, 1), 0.0).tolist()
        places += [f"{what} {name}" for name in trace.coords[what].values]
        at_start += first[order].mean(0).tolist()
    found = [i for i, fall in enumerate(falls) if fall > FALLS]
    worst = int(np.argmax(falls))
    evidence = (
        f"without its {top} largest tokens the mean norm of {places[worst]} falls by {falls[worst]:.0%} "
        f"({at_start[worst]:.0%} of them are first tokens); {tokens_of(trace)}"
    )
    if not found:
        yield Row("ok", evidence, places[worst], falls[worst], tokens, f"> {FALLS:.0%}")
        return
    yield Row(
        "note",
        evidence,
        listed(places[i] for i in found),
        falls[worst],
        tokens,
        f"> {FALLS:.0%}",
        "Means over tokens of these norms and of their products describe those few tokens; use medians, or drop_first "
        "where they are first tokens.",
    )
