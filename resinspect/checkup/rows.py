"""What a check says, and how it names places."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import xarray as xr

Severity = Literal["finding", "note", "ok", "not applicable"]
SEVERITIES: tuple[Severity, ...] = ("finding", "note", "ok", "not applicable")
"""A **finding**: something is broken, untrained or wrong, in the model or in its map. A **note**: something true that
changes how other numbers are to be read. Both only where the data shows it."""


class NotApplicable(Exception):
    """A check cannot say anything here; the message says why."""


@dataclass(frozen=True)
class Row:
    """One statement.

    Attributes:
        severity: One of ``SEVERITIES``.
        evidence: What was measured, with numbers.
        where: Readers, sources, sites, parameters or tokens; empty for the whole.
        value: The number that was held against the threshold.
        n: How many values that number is taken over.
        threshold: From where on it is a finding or a note.
        consequence: What follows, one sentence; empty where nothing does.
    """

    severity: Severity
    evidence: str
    where: str = ""
    value: float = float("nan")
    n: int = 0
    threshold: str = ""
    consequence: str = ""

    def found(self, where: str, consequence: str) -> "Row":
        """The same measurement as a finding."""
        return replace(self, severity="finding", where=where, consequence=consequence)


def listed(names: Iterable[object], *, of: int | None = None, what: str = "") -> str:
    """Names in one cell; ``all 17 readers`` where it is all of them and there are more than three."""
    found = [str(name) for name in names]
    if of is not None and len(found) == of > 3:
        return f"all {of} {what}"
    return ", ".join(found)


def at_token(trace: xr.Dataset, token: int) -> str:
    """A token by sample, position and text."""
    sample, position = (int(trace.coords[name].values[token]) for name in ("sample", "position"))
    return f"sample {sample}, position {position} ({str(trace.coords['text'].values[token])!r})"


def tokens_of(trace: xr.Dataset) -> str:
    """How many tokens of how many prompts, for evidence."""
    prompts = len(np.unique(trace.coords["sample"].values))
    tokens = trace.sizes["token"]
    return f"{tokens} token{'s' * (tokens != 1)} of {prompts} prompt{'s' * (prompts != 1)}"
