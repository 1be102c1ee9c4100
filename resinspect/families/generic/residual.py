"""Following the residual through a probe: what reads it, and how it is formed again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from resinspect.families.generic.explain import ONE, Weight, explain
from resinspect.families.generic.norms import Norm, norm_of
from resinspect.families.generic.probe import Call, Probe


@dataclass(frozen=True, slots=True)
class Write:
    """A module's output that enters the residual, times a weight."""

    call: Call
    weight: Weight


@dataclass(frozen=True, slots=True)
class Step:
    """From one value of the residual to the next: ``norm(keep h + sum weight v)``.

    Attributes:
        layer: Layer in which it happens.
        readers: Calls that read ``h``, in order.
        writes: What is added, in order.
        keep: Weight on ``h``.
        norm: Norm on the sum, whose output is the next value; None for none.
    """

    layer: int
    readers: tuple[Call, ...] = ()
    writes: tuple[Write, ...] = ()
    keep: Weight = ONE
    norm: Norm | None = None


@dataclass
class Residual:
    """The residual of a model, followed from its first layer to its readout.

    Attributes:
        probe: Where it was seen.
        origin: The norm in the first layer whose output it begins with; None where that is the layer's own input.
        steps: In order.
        final: The call that reads the last value; None if nothing does.
        why: Where it was lost, one clause that says at which module.
    """

    probe: Probe
    origin: Call | None = None
    steps: list[Step] = field(default_factory=list)
    final: Call | None = None
    why: str = ""


class Lost(Exception):
    """The residual could not be followed any further."""


def follow(probe: Probe, *, norms: bool) -> Residual:
    """Follow the residual through a probe.

    Args:
        probe: Layers and calls.
        norms: Whether the residual itself may be normed, so that what a norm gives is carried on.
    """
    found = Residual(probe, why=probe.why)
    if probe.why:
        return found
    walk = _Walk(probe, norms=norms)
    try:
        walk.layers()
        found.final = walk.readout()
    except Lost as lost:
        found.why = str(lost)
    found.origin, found.steps = walk.origin, walk.steps
    return found


class _Walk:
    def __init__(self, probe: Probe, *, norms: bool) -> None:
        self.probe, self.norms = probe, norms
        self.origin: Call | None = None
        self.steps: list[Step] = []
        self.layer = 0
        self.state: Tensor = probe.layers[0].read
        self.since = probe.layers[0].start
        self.readers: list[Call] = []

    def layers(self) -> None:
        """Through all layers."""
        for index, layer in enumerate(self.probe.layers):
            self._must(layer.read, layer.start, f"what {layer.path!r} reads")
            self.layer = index
            for call in self._working(layer.start, layer.stop):
                self._enter(call, layer)
            self._must(layer.written, layer.stop, f"what {layer.path!r} gives")
            if any(layer in reader.inside for reader in self.readers):
                raise Lost(f"layer {layer.path!r} reads the residual and adds nothing to it")

    def readout(self) -> Call | None:
        """The first call after the last layer that reads the residual; None only where nothing runs there."""
        last = self.probe.layers[-1]
        for call in self._working(last.stop):
            if _same(call.read, self.state) or self._advance(call.read, call.start):
                self._ends_with(call)
                return call
        for call in self.probe.calls:
            if call.start > last.stop and self._has_width(call.read) and not _same(call.read, self.state):
                raise Lost(f"what {call.path!r} reads after the last layer is no weighted sum of the residual")
        return None

    def _ends_with(self, reader: Call) -> None:
        """Nothing after the readout may add to the residual and go on."""
        self.since = reader.start
        for call in self._working(reader.stop):
            if call.module is not reader.module and self._explained(call.read, self.state, call.start):
                raise Lost(f"what {call.path!r} reads after the last layer is the residual with more added to it")

    def _working(self, after: int, before: float = math.inf) -> list[Call]:
        """Calls that begin within a time and do something to a value of the residual's width."""
        calls = [c for c in self.probe.calls if after < c.start < before]
        return [c for c in calls if self._has_width(c.read) and not _passes(c)]

    def _enter(self, call: Call, layer: Call) -> None:
        if _same(call.read, self.state):
            if not set(call.inside) & set(self.readers):
                self.readers.append(call)
            return
        if not self._is_given(call) and self._advance(call.read, call.start):
            self.readers.append(call)
        elif _enters(call, layer) and norm_of(call) and not self._is_internal(call):
            raise Lost(f"what {call.path!r} reads is no weighted sum of the residual and of what modules gave before")

    def _must(self, target: Tensor, now: int, what: str) -> None:
        """Come to a value that is the residual for certain."""
        if _same(target, self.state) or self._advance(target, now):
            return
        for norm in self._carried_norms():
            if _same(target, norm.call.written):
                self._carry_on(norm, now)
                return
        raise Lost(f"{what} is no weighted sum of the residual before it and of what its modules give")

    def _advance(self, target: Tensor, now: int) -> bool:
        """Whether a value is a new value of the residual; then it is the current one."""
        for norm in (None, *self._carried_norms()):
            carry = norm.call.written if norm else self.state
            if _same(carry, target) or not (found := self._explained(target, carry, now)):
                continue
            keep, writes = found
            if norm:
                self._carry_on(norm, now)
            if writes and not self.readers:
                raise Lost(f"what {writes[0].call.path!r} gives is added, but nothing before it reads the residual")
            self.steps.append(Step(self.layer, tuple(self.readers), tuple(writes), keep))
            self.state, self.since, self.readers = target, now, []
            return True
        return False

    def _explained(self, target: Tensor, carry: Tensor, now: int) -> tuple[Weight, list[Write]] | None:
        """Weights of the carry and of outputs since it was formed: outer modules first, then what is inside them."""
        outputs = [c for c in self._outputs(now) if not _same(c.written, carry) and not _same(c.written, target)]
        for depth in sorted({len(c.inside) for c in outputs} or {0}):
            columns = _distinct([c for c in outputs if len(c.inside) <= depth])
            weights = explain(target, [carry, *(c.written for c in columns)])
            if weights and weights[0]:
                writes = [Write(c, w) for c, w in zip(columns, weights[1:], strict=True) if w]
                holding = [write.call for write in writes if self._holds(write.call, carry)]
                if not holding:
                    return weights[0], sorted(writes, key=lambda write: write.call.stop)
                outputs = [c for c in outputs if c not in holding]
        return None

    def _holds(self, call: Call, carry: Tensor) -> bool:
        """Whether a module adds the residual to its own output inside, so that what it gives is no write."""
        inner = [c for c in self.probe.calls if call in c.inside and self._has_width(c.written)]
        weights = explain(call.written, [carry, *(c.written for c in _distinct(inner))])
        return bool(weights and weights[0])

    def _outputs(self, now: int) -> list[Call]:
        calls = self.probe.calls
        return [c for c in calls if c.start >= self.since and 0 < c.stop <= now and self._has_width(c.written)]

    def _is_given(self, call: Call) -> bool:
        """Whether what a call reads was given by a module that cannot hold a residual sum inside."""
        givers = [c for c in self._outputs(call.start) if _same(c.written, call.read)]
        return any(c.leaf for c in givers)

    def _is_internal(self, call: Call) -> bool:
        """Whether what a call reads comes from within a sublayer: a sum of outputs without the residual."""
        outputs = _distinct(self._outputs(call.start))
        return explain(call.read, [c.written for c in outputs]) is not None

    def _carried_norms(self) -> list[Norm]:
        """Norms that read the residual, whose outputs might be what is carried on; at its very beginning they may."""
        found = [norm_of(c) for c in self.readers] if self.norms or not self.steps else []
        return [norm for norm in found if norm]

    def _carry_on(self, norm: Norm, now: int) -> None:
        """What a norm gave is the residual now."""
        others = [c for c in self.readers if c is not norm.call]
        if not others and not self.steps and not self.origin:
            self.origin = norm.call
        elif others or not self.steps or self.steps[-1].norm:
            self.steps.append(Step(self.layer, tuple(others), norm=norm))
        else:
            self.steps[-1] = replace(self.steps[-1], norm=norm)
        self.state, self.readers = norm.call.written, []
        for call in self._working(norm.call.stop, now):
            if _same(call.read, self.state) and not set(call.inside) & set(self.readers):
                self.readers.append(call)

    def _has_width(self, value: Tensor | None) -> bool:
        return value is not None and value.shape == self.state.shape


def _distinct(calls: Sequence[Call]) -> list[Call]:
    """Outer calls first, then in order; of equal outputs only the first."""
    found: list[Call] = []
    for call in sorted(calls, key=lambda c: (len(c.inside), c.stop)):
        if not any(_same(call.written, other.written) for other in found):
            found.append(call)
    return found


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two values are the same, bit by bit; a cast to another precision changes nothing."""
    return one.shape == other.shape and (torch.equal(one, other) or torch.equal(one, other.to(one.dtype)))


def _enters(call: Call, layer: Call) -> bool:
    """Whether a call within a layer gets what the layer itself hands to its sublayer, however deep it lies in that."""
    around = call.inside[call.inside.index(layer) + 1 :]
    return all(outer.read is not None and _same(outer.read, call.read) for outer in around)


def _passes(call: Call) -> bool:
    """Whether a module gives what it got: dropout outside of training, identities, hook points."""
    return call.read is not None and call.written is not None and _same(call.written, call.read)
