"""The recorder: turns the events of one forward pass into rows of W and the geometry beside them, online."""

from collections import defaultdict

import torch
from torch import Tensor

from resinspect.anatomy import Site
from resinspect.errors import CaptureError
from resinspect.families import Event, Layout
from resinspect.hooks.geometry import chunks, lengths, measure_pairs, measure_readers, measure_terms, measure_writes
from resinspect.hooks.prompts import Batch
from resinspect.hooks.terms import push_terms
from resinspect.program import COEFFICIENT, COEFFICIENT_PATHS, Connection, Native, Unroll, one_hot, solve

WILD = 0.05
"""A map that misses more than this share of a reader's input by more than rounding is wrong, not inexact."""
NORMAL_EQUATIONS = 1e-9
"""Rounding of a float64 solve, whose sources may be dependent up to pivots of 1e-14."""
READOUT = frozenset({"lens", "attribution"})
"""Parts of a trace that look at the final readout once the run is over."""
READERS_AT_ONCE = 5
"""Reader inputs held back to be measured together: more is faster, fewer keeps memory near that of the writes."""


def tolerance(method: str, dtype: torch.dtype) -> float:
    """Units of rounding below which an error counts as rounding (see ``resinspect.trace.verdict``).

    Measured maps stay below 1 (float32, float64) and 0.3 (half precision). A solve does not know what cancels inside
    the scheme, and adds the rounding of its normal equations.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return 1.0
    return 16.0 if method == "solve" else 4.0


class Recorder:
    """Receives every source, native and reader of one batch, in the order in which the model runs.

    Writes go into one buffer ``(token, source, d)``. A row of W exists as soon as its reader fires (replay), or at
    the end (solve). Reader inputs are compared with their reconstruction in small groups and then dropped.

    Args:
        layout: The model's sources, readers and program.
        batch: Says which places of ``(batch, token)`` are real tokens.
        method: ``"replay"`` or ``"solve"``.
        keep: Optional groups: ``"gram"``, ``"cross"``, ``"natives"``, ``"hidden"``; with one of ``READOUT`` the writes
            stay until ``release``.

    Attributes:
        dtype: In which the model formed its residual, once it ran.
        width: Channels of the residual, once it ran.
    """

    dtype: torch.dtype
    width: int

    def __init__(self, layout: Layout, batch: Batch, method: str, keep: frozenset[str]) -> None:
        self.layout, self.batch, self.method, self.keep = layout, batch, method, keep
        self.natives: dict[int, Native] = defaultdict(dict)
        self._measured: dict[str, list[Tensor]] = defaultdict(list)
        self._hidden: list[Tensor] = []
        self._written = self._read = self._in_group = 0
        self._writes = self._norms = self._group = self._weight = self._magnitude = None
        self._programs: list[tuple[Unroll, Tensor]] = []
        self._online = method == "replay" and layout.connection.carrier == COEFFICIENT

    def receive(self, event: Event, value: Tensor) -> None:
        """Take one event; ``value`` is ``(batch, token, ...)`` and is copied."""
        if value.shape[:2] != self.batch.ids.shape and value.shape[:1] == (self.batch.ids.numel(),):
            value = value.unflatten(0, self.batch.ids.shape)  # some layers flatten (batch, token)
        if value.shape[:2] != self.batch.ids.shape:
            raise CaptureError(
                f"{self._name(event)} has shape {tuple(value.shape)}, but the batch has (batch, token) = "
                f"{tuple(self.batch.ids.shape)}; only models that keep these two leading dimensions can be captured."
            )
        value = self.batch.real(value)
        if event.what == "source":
            self._on_source(event, value)
        elif event.what == "reader":
            self._on_reader(event, value)
        else:
            self.natives[event.index][event.name] = value.clone()

    def finish(self) -> dict[str, Tensor]:
        """All measures of the batch, each with leading dimension token.

        Raises:
            CaptureError: If a source or reader never fired.
        """
        anatomy = self.layout.anatomy
        if self._written < len(anatomy.sources):
            raise CaptureError(f"source {anatomy.sources[self._written].name!r} never ran in the forward pass.")
        if self._read < len(anatomy.readers):
            raise CaptureError(f"reader {anatomy.readers[self._read].name!r} never ran in the forward pass.")
        result = {"weight": self._weight}
        if self._online:
            self._flush()
        else:
            result |= self._solve_all() if self.method == "solve" else self._push_terms()
            self._weight = result["weight"]
            if "gram" in self.keep:
                parts = [measure_pairs(self._writes[c], self._group[c]) for c in chunks(self._writes)]
                result |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._group = None
        result |= {name: torch.cat(parts, dim=1) for name, parts in self._measured.items()}
        self._measured.clear()
        result |= measure_writes(self._writes, gram="gram" in self.keep)
        result["source_norm"] = self._norms.to(self._weight.dtype)
        if "hidden" in self.keep:
            result |= {"reader_hidden": torch.stack(self._hidden, dim=1), "source_hidden": self._writes}
        if not self.keep & READOUT:
            self.release()
        return result

    def release(self) -> None:
        """Forget the writes, which are as large as everything else together."""
        self._writes = None

    def final_contributions(self, part: slice) -> Tensor:
        """What the final reader gets of each source, ``(token, source, d)``, for some tokens; once finished."""
        if self.method == "solve" or self._online:
            return self._weight[part, -1, :, None] * self._writes[part]
        first, stop, _ = part.indices(len(self._writes))
        terms = []
        for inner in chunks(self._writes[part], copies=4 * len(self.layout.anatomy.readers)):
            at = slice(first + inner.start, min(first + inner.stop, stop))
            terms.append(push_terms(self.layout, self._natives(at), self._writes[at])[0][:, -1])
        return torch.cat(terms)

    def _natives(self, part: slice) -> dict[int, Native]:
        return {i: {name: value[part] for name, value in native.items()} for i, native in self.natives.items()}

    def _on_source(self, event: Event, value: Tensor) -> None:
        self._expect(event, self._written)
        if self._writes is None:
            self._allocate(value)
        self._writes[:, event.index] = value
        self._norms[:, event.index] = lengths(value)
        self._written += 1

    def _on_reader(self, event: Event, value: Tensor) -> None:
        self._expect(event, self._read)
        reader = self.layout.anatomy.readers[event.index]
        if self._written < reader.prefix:
            missing = self.layout.anatomy.sources[self._written].name
            raise CaptureError(f"reader {reader.name!r} ran before source {missing!r} was written.")
        if self._in_group == self._group.shape[1]:
            self._flush()
        self._group[:, self._in_group] = value
        self._in_group += 1
        self._read += 1
        if "hidden" in self.keep:
            self._hidden.append(value.clone())
        if self._online:
            self._advance(event.index)

    def _advance(self, reader: int) -> None:
        """At the first input of a site, run the program up to it and store the rows of all its inputs.

        The writes of earlier sites come only now: their natives may follow the write itself.
        """
        anatomy = self.layout.anatomy
        site = anatomy.site_of(reader)
        if reader != anatomy.readers_of(site)[0]:
            return
        for unroll, rows in self._programs:
            slots = unroll.read_at(site, self._native)
            for index, row in zip(anatomy.readers_of(site), slots, strict=True):
                prefix = anatomy.readers[index].prefix
                rows[:, index, :prefix] = row[..., :prefix]

    def _native(self, site: Site) -> Native:
        return {name: value.double() for name, value in self.natives.get(site.index, {}).items()}

    def _flush(self) -> None:
        """Measure the held-back readers against the writes so far."""
        if not self._in_group:
            return
        stop, count = self._read, self._in_group
        prefix = max(r.prefix for r in self.layout.anatomy.readers[stop - count : stop])
        weight, magnitude = (
            rows[:, stop - count : stop, :prefix].nan_to_num() for rows in (self._weight, self._magnitude)
        )
        self._measure(self._writes[:, :prefix], self._group[:, :count], weight, magnitude, first=stop - count)
        self._in_group = 0

    def _measure(self, writes: Tensor, inputs: Tensor, weight: Tensor, magnitude: Tensor, *, first: int) -> None:
        measured = measure_readers(writes, self._norms[:, : writes.shape[1]], inputs, weight, magnitude)
        cross = measured.pop("cross")
        if "cross" in self.keep:
            self._measured["cross"].append(self._within_reach(cross, first))
        for name, value in measured.items():
            self._measured[name].append(value)

    def _within_reach(self, values: Tensor, first: int = 0) -> Tensor:
        """Values of consecutive readers over the sources so far, ``(token, reader, source)``, NaN beyond a prefix."""
        full = torch.full_like(self._weight[:, : values.shape[1]], torch.nan)
        for i, reader in enumerate(self.layout.anatomy.readers[first : first + values.shape[1]]):
            full[:, i, : reader.prefix] = values[:, i, : reader.prefix]
        return full

    def _push_terms(self) -> dict[str, Tensor]:
        """Push every write through the program as a vector of its own, a few tokens at a time."""
        parts = []
        for part in chunks(self._writes, copies=4 * len(self.layout.anatomy.readers)):
            terms, paths = push_terms(self.layout, self._natives(part), self._writes[part])
            parts.append(measure_terms(self._writes[part], self._group[part], terms, paths))
        measured = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        by_source = {name: value for name, value in measured.items() if value.ndim == 3}
        for name in measured.keys() - by_source.keys():
            self._measured[name].append(measured[name])
        if "cross" not in self.keep:
            del by_source["cross"]
        return {name: self._within_reach(value) for name, value in by_source.items()}

    def _solve_all(self) -> dict[str, Tensor]:
        """Solve every reader; where a weight is not identifiable it is NaN, its error bound says why."""
        prefix = [reader.prefix for reader in self.layout.anatomy.readers]
        eps = torch.finfo(self._writes.dtype).eps
        parts = [solve(self._writes[c], self._group[c], prefix, eps=eps) for c in chunks(self._writes)]
        weight, error, identifiable = (torch.cat(values) for values in zip(*parts, strict=True))
        weight, error = weight.to(self._weight.dtype), error.to(self._weight.dtype)
        fit = weight.nan_to_num()
        self._measure(self._writes, self._group, fit, fit.abs(), first=0)
        # A fit that closes with weights that nothing determines says nothing about the map. One that does not close
        # says that something is missing, however much of it the fit took up.
        fidelity, kappa = (self._measured[name][0] for name in ("fidelity", "kappa"))
        reach = torch.tensor(prefix, device=weight.device)
        rounding = tolerance("solve", self.dtype) * max(eps, NORMAL_EQUATIONS) * kappa * reach.sqrt()
        closes = fidelity.isfinite() & (fidelity <= rounding)
        fidelity[~identifiable.any(-1) & ((reach >= self.width) | closes)] = torch.nan
        return {"weight": weight.masked_fill(~identifiable, torch.nan), "weight_error": error}

    def _allocate(self, value: Tensor) -> None:
        tokens, width = value.shape
        self.dtype, self.width = value.dtype, width
        sources, readers = len(self.layout.anatomy.sources), len(self.layout.anatomy.readers)
        kind = torch.float64 if value.dtype == torch.float64 else torch.float32
        group = min(readers, READERS_AT_ONCE) if self._online else readers
        self._writes = value.new_empty(tokens, sources, width)
        self._norms = value.new_empty(tokens, sources, dtype=torch.float64)
        self._group = value.new_empty(tokens, group, width)
        self._weight = torch.full((tokens, readers, sources), torch.nan, dtype=kind, device=value.device)
        if self._online:
            # In float64, so that W has only the rounding of the natives themselves.
            unit = one_hot(sources, dtype=torch.float64, device=value.device)
            connection, anatomy = self.layout.connection, self.layout.anatomy
            self._programs = [(Unroll(connection, anatomy, COEFFICIENT, unit), self._weight)]
            self._magnitude = self._weight
            if not _adds_up_plainly(connection):
                self._magnitude = self._weight.clone()
                self._programs.append((Unroll(connection, anatomy, COEFFICIENT_PATHS, unit), self._magnitude))

    def _expect(self, event: Event, index: int) -> None:
        if event.index != index:
            due = self._name(Event(event.what, index)) if event.index > index else ""
            happened = f"ran out of order, {due} was due" if due else "ran a second time"
            raise CaptureError(
                f"{self._name(event)} {happened} in one forward pass; shared, looped or reordered modules need a "
                "layout that says so, in sublayers= a name for each call in the order in which they run."
            )

    def _name(self, event: Event) -> str:
        anatomy = self.layout.anatomy
        if event.what == "native":
            return f"native {event.name!r} of {anatomy.sites[event.index].name!r}"
        items = anatomy.sources if event.what == "source" else anatomy.readers
        return f"{event.what} {items[event.index].name!r}"


def _adds_up_plainly(connection: Connection) -> bool:
    """Whether its verbs are those of the plain residual, whose weights are their own absolute paths."""
    kind = type(connection)
    return all(getattr(kind, verb) is getattr(Connection, verb) for verb in ("start", "read", "write"))
