"""Edits: what an intervention makes of a reader's row of W, or of a write itself.

Each is data that any run can use: nothing here knows a model. Rows are weights ``(token, source)`` where W is one
scalar per source and token, and contributions ``(token, source, d)`` elsewhere; edits that put one row in another's
place need the first, edits that scale contributions take both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from resinspect.anatomy import Reader
from resinspect.errors import OptionError

MODES = ("readers", "everywhere")


@dataclass(frozen=True)
class Tokens:
    """The real tokens of one batch.

    Attributes:
        sample: Prompt of each, ``(token)``.
        position: Position in the prompt, ``(token)``.
    """

    sample: Tensor
    position: Tensor


@dataclass(frozen=True)
class Place:
    """Where a row is.

    Attributes:
        reader: The reader.
        sources: Names of the sources that it can read.
        tokens: Of the row.
        mean: The reader's mean row ``(source)`` over all prompts, unedited, where the edit asks for it.
    """

    reader: Reader
    sources: Sequence[str]
    tokens: Tokens
    mean: Tensor | None = None

    def scaled(self, row: Tensor, factors: Tensor) -> Tensor:
        """A row whose sources are multiplied by ``factors (source)``."""
        return row * factors.to(row.device, row.dtype).reshape(-1, *(1,) * (row.ndim - 2))


Form = Callable[[Place, Tensor], Tensor]
When = Callable[[Tokens], Tensor]


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
        name: Of the edit, as results show it.
        form: The new row of a reader, from the place and its row.
        readers: Names of the readers that it may change; None for all.
        sources: Names of sources that it needs.
        scalar: Whether it needs one scalar per source and token.
        mean: Whether it needs the mean row over all prompts.
        zeroed: Names of sources whose write itself is replaced by zero, so that routers and carry miss it as well.
        when: At which tokens writes are zeroed, bool ``(token)``; None for all.
        given: Names of the readers and of the sources whose rows it brings along, where it does.
    """

    name: str
    form: Form = lambda place, row: row
    readers: tuple[str, ...] | None = ()
    sources: tuple[str, ...] = ()
    scalar: bool = False
    mean: bool = False
    zeroed: tuple[str, ...] = ()
    when: When | None = None
    given: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def row(self, place: Place, row: Tensor) -> Tensor:
        """The new row at a place."""
        changes = self.readers is None or place.reader.name in self.readers
        return self.form(place, row) if changes else row


def ablate_edge(source: str, reader: str, *, factor: float = 0.0) -> Edit:
    """One reader no longer gets one source: ``h' = h + (factor - 1) c_rs``.

    Args:
        source: Name of the source, such as ``"0.attn"``.
        reader: Name of the reader.
        factor: The multiplier m of the contribution: 0 removes it, 1 changes nothing.
    """
    kept = "" if factor == 0 else f" x {factor:g}"
    return Edit(f"ablate_edge {source} -> {reader}{kept}", _without(source, factor), (reader,), (source,))


def ablate_source(source: str, *, mode: Literal["readers", "everywhere"]) -> Edit:
    """No reader gets a source any more.

    Args:
        source: Name of the source.
        mode: ``"readers"`` takes its contribution out of what every reader reads, but routers and the carry still see
            it; ``"everywhere"`` replaces the write itself by zero, so that routing downstream is computed without it.
            Schemes with a softmax over depth keep a zero vector among their keys: it is not taken out of the softmax.

    Raises:
        OptionError: If there is no such mode.
    """
    if mode not in MODES:
        raise OptionError(f"mode is {mode!r}; choose one of {', '.join(MODES)}.")
    name = f"ablate_source {source} ({mode})"
    if mode == "everywhere":
        return Edit(name, sources=(source,), zeroed=(source,))
    return Edit(name, _without(source, 0.0), None, (source,))


def recency_only(last: int = 1, *, readers: Sequence[str] | None = None) -> Edit:
    """Readers get only their newest sources.

    Args:
        last: How many sources, counted back from each reader.
        readers: Names of the readers; None for all.

    Raises:
        OptionError: If ``last`` is below 1.
    """
    if last < 1:
        raise OptionError(f"last is {last}; a reader must keep at least 1 source.")

    def form(place: Place, row: Tensor) -> Tensor:
        count = len(place.sources)
        return place.scaled(row, torch.arange(count) >= count - last)

    return Edit(titled(f"recency_only {last}", readers), form, named(readers))


def _without(source: str, factor: float) -> Form:
    def form(place: Place, row: Tensor) -> Tensor:
        factors = torch.tensor([factor if name == source else 1.0 for name in place.sources], dtype=torch.float64)
        return place.scaled(row, factors)

    return form


def named(readers: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names of readers as an edit holds them; one name alone is one reader."""
    return None if readers is None else (readers,) if isinstance(readers, str) else tuple(readers)


def titled(name: str, readers: Sequence[str] | None) -> str:
    """The name of an edit, and at which readers if not at all."""
    return name if readers is None else f"{name} at {', '.join(named(readers)) or 'no reader'}"
