"""The table of checks, and running it."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.checkup.gates import saturated_gates
from resinspect.checkup.parameters import sees_the_future, without_effect, without_gradient
from resinspect.checkup.patient import Patient
from resinspect.checkup.routing import equal_weights, softmax_sums, uniform_routing
from resinspect.checkup.rows import SEVERITIES, NotApplicable, Row, tokens_of
from resinspect.checkup.samples import TEXTS, random_ids
from resinspect.checkup.sources import cumulative_sources, discarded, dominant_source
from resinspect.checkup.streams import collapsed_streams, frozen_mixing, mixing_sums
from resinspect.checkup.values import extreme_tokens, fidelity, non_finite, zero_sources
from resinspect.errors import MapError, OptionError, TraceError
from resinspect.trace import require_trace

Check = Callable[[Patient], Iterator[Row]]

CHECKS: dict[str, Check] = {
    "fidelity": fidelity,
    "non-finite values": non_finite,
    "uniform routing": uniform_routing,
    "equal weights": equal_weights,
    "frozen mixing": frozen_mixing,
    "parameters without effect": without_effect,
    "parameters without gradient": without_gradient,
    "zero sources": zero_sources,
    "dominant source": dominant_source,
    "softmax sums": softmax_sums,
    "mixing sums": mixing_sums,
    "collapsed streams": collapsed_streams,
    "saturated gates": saturated_gates,
    "attention to the future": sees_the_future,
    "cumulative sources": cumulative_sources,
    "discarded by scalar W": discarded,
    "extreme tokens": extreme_tokens,
}
"""Every check by name. One more costs one function and one line."""

COLUMNS = ("check", "severity", "where", "evidence", "value", "n", "threshold", "consequence")
_SAID_BY_CHECKS = ("the map is off", ".*sees later tokens")


def doctor(
    model_or_trace: Any,
    prompts: Any = None,
    *,
    tokenizer: Any = None,
    method: str = "auto",
    batch_size: int = 8,
    truncate: bool = False,
    sublayers: Any = None,
    final: str | None = None,
    checks: Iterable[str] | None = None,
) -> pd.DataFrame:
    """Examine a model or a trace: what is broken, untrained or wrong, and what changes how numbers are to be read.

    A model is captured once on the prompts; some checks then run it again, move routing parameters, and put them back
    bit by bit. Of a trace alone, checks that need the model are "not applicable". The docstring of each check in
    ``CHECKS`` states its threshold and the reason for it.

    Args:
        model_or_trace: A model, as for ``ri.capture``, or a trace.
        prompts: As for ``ri.capture``; only with a model. Default: six passages of English prose if there is a
            tokenizer, cut to the model's context, else random token ids; a note says so.
        tokenizer: Encodes texts and labels tokens.
        method: As for ``ri.capture``.
        batch_size: Prompts per forward pass.
        truncate: Cut prompts that are longer than the context instead of refusing them.
        sublayers: As for ``ri.capture``.
        final: As for ``ri.capture``.
        checks: Names of checks to run; default all.

    Returns:
        One row per statement, in the order of the table: ``check``, ``severity`` (``"finding"``, ``"note"``, ``"ok"``,
        ``"not applicable"``), ``where``, ``evidence`` (numbers with how many tokens), ``value`` (held against the
        threshold), ``n``, ``threshold``, ``consequence``. Attributes: ``model``, ``scheme``, ``examined``.

    Raises:
        ResinspectError: If the model cannot be captured or the trace is none; a map that capture refuses as wrong is a
            finding instead.
    """
    wanted = list(CHECKS) if checks is None else list(checks)
    if unknown := [name for name in wanted if name not in CHECKS]:
        raise OptionError(f"there is no check {unknown[0]!r}; choose from {', '.join(CHECKS)}.")
    if isinstance(model_or_trace, xr.Dataset):
        if prompts is not None:
            raise OptionError("a trace has its own prompts; give prompts with a model only.")
        patient, notes = Patient(require_trace(model_or_trace)), []
    else:
        options = {"tokenizer": tokenizer, "method": method, "batch_size": batch_size}
        options |= {"truncate": truncate, "sublayers": sublayers, "final": final}
        patient, notes = _admit(model_or_trace, prompts, options)
    rows = [("prompts", note) for note in notes] + [(name, row) for name in wanted for row in _run(name, patient)]
    report = pd.DataFrame([{"check": name, **asdict(row)} for name, row in rows], columns=list(COLUMNS))
    trace = patient.trace
    report.attrs = {"model": trace.attrs["model"], "scheme": trace.attrs["scheme"], "examined": tokens_of(trace)}
    return report


def exit_code(report: pd.DataFrame) -> int:
    """1 if there is a finding, else 0."""
    return int((report["severity"] == SEVERITIES[0]).any())


def _run(name: str, patient: Patient) -> Iterator[Row]:
    try:
        # A sick patient has NaN, inf and zeros everywhere; what they mean is for the checks to say.
        with _quiet(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            rows = list(CHECKS[name](patient))
        yield from rows
    except (NotApplicable, TraceError) as reason:
        yield Row("not applicable", str(reason).rstrip("."))


def _admit(model: Any, prompts: Any, options: dict[str, Any]) -> tuple[Patient, list[Row]]:
    """Capture a model; of a map that is refused as wrong, the batch that shows it."""
    from torch import nn

    from resinspect.families import find_layout, name_layout
    from resinspect.families.wrapped import bridged
    from resinspect.hooks.capture import capture
    from resinspect.hooks.causality import require_weights
    from resinspect.hooks.taps import unwrapped

    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise OptionError(
            f"the doctor examines a model or a trace, not a {kind}; load it with ri.load or ri.open_trace."
        )
    inner = bridged(unwrapped(model))
    require_weights(inner)
    encoded, notes = _encode(inner, prompts, options)
    refused = ""
    with _quiet():
        try:
            trace = capture(model, encoded, **options)
        except MapError as error:
            trace, refused = error.trace, str(error)
    if options["sublayers"] is not None:
        layout = name_layout(unwrapped(model), options["sublayers"], options["final"])
    else:
        layout = find_layout(inner)
    return Patient(trace, inner, layout, encoded, refused), notes


def _encode(model: Any, prompts: Any, options: dict[str, Any]) -> tuple[list[list[int]], list[Row]]:
    """Token ids of the prompts, or of what stands in for them, and a note about it."""
    from resinspect.families.forward import context_of, vocabulary
    from resinspect.hooks.prompts import encode_prompts

    context = context_of(model)
    known = {"max_length": context, "vocab_size": vocabulary(model)}
    tokenizer = options["tokenizer"]
    if prompts is not None:
        return encode_prompts(prompts, tokenizer, **known, truncate=options["truncate"]), []
    if tokenizer is None and known["vocab_size"] is None:
        raise OptionError("the model does not say how many token ids it knows; give prompts.")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "prompt .* was cut")
        given = random_ids(known["vocab_size"], context) if tokenizer is None else TEXTS
        encoded = encode_prompts(given, tokenizer, **known, truncate=True)
    what = "random token ids" if tokenizer is None else "passages of English prose"
    count = sum(map(len, encoded))
    says = "Routing and norms on text of the model's own kind may differ; give prompts."
    return encoded, [Row("note", f"no prompts given: {len(encoded)} {what}, {count} tokens", n=count, consequence=says)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that checks say in rows of their own."""
    with warnings.catch_warnings():
        for message in _SAID_BY_CHECKS:
            warnings.filterwarnings("ignore", message)
        yield
