"""The editor: follows one forward pass online, and puts edited reader inputs and writes into it.

It runs the same linear program as a capture, one event at a time, on what the **edited** run itself gives. So it always
knows what every reader should get, compares that with what it does get, and an edit that reaches more than what is read
is found out: from the next reader on, the map no longer adds up.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from resinspect.anatomy import Site
from resinspect.errors import CaptureError
from resinspect.families import Event, Layout, Tap
from resinspect.hooks.prompts import Batch
from resinspect.interventions.edits import Edit, Place, Tokens
from resinspect.program import COEFFICIENT, TERM, Native, Unroll, one_hot, terms

LEAK = {torch.float64: 1e-3, torch.float32: 1e-3}
"""What an edited run may miss of its own map, relative to the sum of all contributions; half precision: 0.05."""
Natives = Mapping[int, Native]


class Rows:
    """Rows of readers, as a run comes to them: weights ``(token, source)``, or contributions ``(token, source, d)``.

    Args:
        layout: The model's program.
        writes: The buffer ``(token, source, d)``, which fills up as the model runs.
        natives: Per site; may fill up too.
    """

    def __init__(self, layout: Layout, writes: Tensor, natives: Natives) -> None:
        self.anatomy, self.writes, self.natives = layout.anatomy, writes, natives
        self.scalar = layout.connection.carrier == COEFFICIENT
        # In float64, so that W has only the rounding of the natives themselves.
        self.kind = torch.float64 if self.scalar else writes.dtype
        unit = one_hot(writes.shape[1], dtype=self.kind, device=writes.device) if self.scalar else terms(writes)
        self.unroll = Unroll(layout.connection, layout.anatomy, COEFFICIENT if self.scalar else TERM, unit)
        self._slots: tuple[Tensor, ...] = ()
        self._known = 0

    def at(self, reader: int) -> Tensor:
        """The row of the next reader."""
        site, prefix = self.anatomy.site_of(reader), self.anatomy.readers[reader].prefix
        readers, known = self.anatomy.readers_of(site), len(self.natives.get(site.index, {}))
        if reader == readers[0]:
            self._slots = self.unroll.read_at(site, self._native)
        elif known > self._known:
            self._slots = self.unroll.read_again(self._native(site))
        self._known, row = known, self._slots[reader - readers[0]]
        if self.scalar:
            return row.expand(len(self.writes), -1)[:, :prefix]
        return row[:, :prefix]

    def total(self, row: Tensor) -> Tensor:
        """What a row adds up to, ``(token, d)``."""
        if not self.scalar:
            return row.sum(1)
        return (row.to(self.writes.dtype)[:, None] @ self.writes[:, : row.shape[1]]).squeeze(1)

    def size(self, row: Tensor) -> Tensor:
        """The sum of the contributions' lengths, ``(token)``."""
        if not self.scalar:
            return row.norm(dim=-1).sum(-1)
        return (row.abs() * self.writes[:, : row.shape[1]].norm(dim=-1)).sum(-1)

    def _native(self, site: Site) -> Native:
        known = {name: value.to(self.kind) for name, value in self.natives.get(site.index, {}).items()}
        return _SoFar(known, self.writes) if len(site.views) > 1 else known


class _SoFar(dict[str, Tensor]):
    """Natives of a site whose inputs are formed one after the other: those of later inputs, yet unknown, stand as 0."""

    def __init__(self, known: Native, like: Tensor) -> None:
        super().__init__(known)
        self.like = like

    def __missing__(self, name: str) -> Tensor:
        return self.like.new_zeros(len(self.like), 1)


class Editor:
    """Receives every source, native and reader of one batch, and returns what shall be in its place, if anything.

    Args:
        layout: The model's sources, readers and program.
        batch: Says which places of ``(batch, token)`` are real tokens.
        edit: The edit; the base edit changes nothing.
        means: Mean rows per reader, for edits that ask for them.
        frozen: Natives of the clean run, where all readers shall be routed by them; None routes by the edited run.

    Attributes:
        natives: Per site, as the model computed them.
        writes: ``(token, source, d)``, once it ran.
        rows: Per reader, unedited, where ``keep_rows`` asks for them.
        missed: Per reader, the median over tokens of what the map misses.
    """

    def __init__(
        self,
        layout: Layout,
        batch: Batch,
        edit: Edit,
        *,
        means: Sequence[Tensor] | None = None,
        frozen: Natives | None = None,
        keep_rows: bool = False,
    ) -> None:
        self.layout, self.batch, self.edit, self.means, self.frozen = layout, batch, edit, means, frozen
        self.tokens = tokens_of(batch)
        self.natives: dict[int, Native] = defaultdict(dict)
        self.writes: Tensor | None = None
        self.rows: list[Tensor] | None = [] if keep_rows else None
        self.missed: list[float] = []
        self._names = [source.name for source in layout.anatomy.sources]
        self._taps = {tap.event: tap for tap in layout.taps if tap.event}
        self._own: Rows | None = None
        self._routed: Rows | None = None

    def receive(self, event: Event, value: Tensor) -> Tensor | None:
        """Take one event ``(batch, token, ...)``; the tensor that replaces it, or None to leave it."""
        seen, shape = value, self.batch.ids.shape
        if value.shape[:2] != shape and value.shape[:1] == (shape.numel(),):
            value = value.unflatten(0, shape)  # some layers flatten (batch, token)
        if value.shape[:2] != shape:
            raise CaptureError(
                f"what {self._taps[event].path!r} gives has shape {tuple(value.shape)}, but the batch has (batch, "
                f"token) = {tuple(shape)}; only models that keep these two dimensions can be edited."
            )
        with torch.autocast(value.device.type, enabled=False):
            packed = self.batch.real(value)
            if event.what == "native":
                self.natives[event.index][event.name] = packed.clone()
                return None
            edited = self._on_source(event, packed) if event.what == "source" else self._on_reader(event, packed)
        return None if edited is None else self._unpacked(value, edited).reshape(seen.shape)

    def _on_source(self, event: Event, value: Tensor) -> Tensor | None:
        if self.writes is None:
            kind = value.dtype if value.element_size() >= 4 else torch.float32
            self.writes = value.new_zeros(len(value), len(self._names), value.shape[-1], dtype=kind)
        gone = self._names[event.index] in self.edit.zeroed
        if gone:
            when = torch.ones_like(self.tokens.sample, dtype=torch.bool)
            when = when if self.edit.when is None else self.edit.when(self.tokens)
            value = value.masked_fill(when.to(value.device)[:, None], 0.0)
            self._refuse(self._taps[event], self._names[event.index])
        self.writes[:, event.index] = value
        return value if gone else None

    def _on_reader(self, event: Event, value: Tensor) -> Tensor | None:
        if self._own is None:
            self._own = Rows(self.layout, self.writes, self.natives)
            self._routed = self._own if self.frozen is None else Rows(self.layout, self.writes, self.frozen)
        own = self._own.at(event.index)
        routed = own if self._routed is self._own else self._routed.at(event.index)
        self._compare(event.index, value, own)
        if self.rows is not None:
            self.rows.append(own)
        reader = self.layout.anatomy.readers[event.index]
        mean = None if self.means is None else self.means[event.index]
        row = self.edit.row(Place(reader, self._names[: reader.prefix], self.tokens, mean), routed)
        if torch.equal(row, own):
            return None
        self._refuse(self._taps[event], reader.name)
        return (value + self._own.total(row - own)).to(value.dtype)

    def _compare(self, reader: int, value: Tensor, row: Tensor) -> None:
        """Whether what a reader gets is what the map of this very run says."""
        real = value.to(self.writes.dtype)
        size = self._own.size(row) + real.norm(dim=-1)
        error = (real - self._own.total(row)).norm(dim=-1)
        missed = float(torch.where(size > 0, error / size, 0.0).median())
        self.missed.append(missed)
        if not missed <= LEAK.get(value.dtype, 0.05):
            name = self.layout.anatomy.readers[reader].name
            raise CaptureError(
                f"with {self.edit.name!r}, what reader {name!r} gets is not what the map says (it misses {missed:.1e} "
                f"of it): the edit reached more of the model than what is read, or the map of this "
                f"{self.layout.family!r} model is wrong; capture it and look at its verdict."
            )

    def _refuse(self, tap: Tap, name: str) -> None:
        if tap.carried:
            raise CaptureError(
                f"reader {name!r} cannot be edited: the model also carries on from what it reads there ({tap.path!r}), "
                "so an edit would change the residual itself; edit other readers, or ablate a source everywhere with "
                'downstream="recomputed".'
            )
        if not can_put(tap):
            raise CaptureError(
                f"{tap.event.what} {name!r} cannot be edited: its family {self.layout.family!r} computes it from what "
                f"{tap.path!r} shows and knows no way to put it back."
            )

    def _unpacked(self, value: Tensor, packed: Tensor) -> Tensor:
        """The real tokens back in their places."""
        if not self.batch.padded:
            return packed.view_as(value)
        value = value.clone()
        value[self.batch.mask.to(value.device)] = packed.to(value.dtype)
        return value


def can_put(tap: Tap) -> bool:
    """Whether a tensor can be put where a tap sees it. What is read at an input is one consumer's, not the write."""
    if tap.put is not None:
        return True
    return tap.pick is None and (tap.side == "output" or tap.event.what == "reader")


def tokens_of(batch: Batch) -> Tokens:
    """The real tokens of a batch, packed."""
    rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None].expand_as(batch.ids)
    return Tokens(batch.real(rows) + batch.first_sample, batch.real(batch.positions))
