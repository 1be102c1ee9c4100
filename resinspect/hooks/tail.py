"""A model's tail: from what the final reader reads to logits, as a function of any vector.

Found by one small forward pass, without a word about names: the modules that led from the final reader's input to the
head's, the head, and what became of its output (a scale or a soft cap). It counts only if it gives the model's logits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Layout
from resinspect.families.forward import call, evaluating
from resinspect.families.generic.norms import Norm, norm_of
from resinspect.families.generic.probe import Call
from resinspect.hooks.causality import LONGEST, logits_of
from resinspect.hooks.taps import attached

ROUNDINGS = 16.0
"""The tail may miss the model's logits by so many units of rounding of their norm."""


@dataclass(frozen=True)
class Finish:
    """What becomes of the head's output: ``scale x``, or ``cap tanh(x / cap)``."""

    scale: float = 1.0
    cap: float = 0.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Logits from the head's output."""
        return self.cap * torch.tanh(raw / self.cap) if self.cap else (raw if self.scale == 1 else self.scale * raw)


@dataclass(frozen=True)
class Tail:
    """From the final reader's input to logits.

    Attributes:
        steps: Modules before the head, such as the last norm.
        scale: What their result is multiplied with.
        head: The module whose output becomes the logits.
        finish: What becomes of that output.
        vocabulary: How many logits the model gives; a padded head has more rows.
        norm: The one step as a norm, None if there is none or it is something else.
        dtype: Of the final reader's input.
        autocast: What the model ran under, None for nothing: its tail does so too.
    """

    steps: tuple[nn.Module, ...]
    scale: float
    head: nn.Module
    finish: Finish
    vocabulary: int
    norm: Norm | None
    dtype: torch.dtype
    autocast: torch.dtype | None

    def normed(self, hidden: Tensor) -> Tensor:
        """``(token, d)`` after the steps before the head, ``(token, d)``."""
        value = hidden.to(self.dtype)[None]
        with self._as_it_ran(hidden):
            for step in self.steps:
                value = step(value)
        return value[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits ``(token, vocabulary)`` of vectors ``(token, d)`` in the place of the final reader's input."""
        normed = self.normed(hidden)
        read = normed if self.scale == 1 else self.scale * normed
        with self._as_it_ran(hidden):
            raw = self.head(read[None])[0, :, : self.vocabulary]
        return self.finish(raw)

    def _as_it_ran(self, hidden: Tensor) -> torch.autocast:
        return torch.autocast(hidden.device.type, self.autocast, enabled=self.autocast is not None)


def find_tail(model: nn.Module, layout: Layout, prompts: Sequence[Sequence[int]], device: torch.device) -> Tail:
    """The tail of a model.

    Raises:
        CaptureError: If the model has no logits, or no modules of its own give them from its final reader.
    """
    ids = torch.tensor([list(max(prompts, key=len)[:LONGEST])], device=device)
    final = len(layout.anatomy.readers) - 1
    watch = _Watch(final, ids.shape)
    with evaluating(model):
        with watch.attached(model, layout):
            logits = logits_of(call(model, ids, use_cache=False, return_dict=True))
        if logits is None or logits.shape[:2] != ids.shape:
            raise CaptureError(
                f"{type(model).__name__} gives no logits, so it has no lens and no attribution; capture a model with a "
                "language-model head, or without them in keep."
            )
        tail = watch.tail(logits[0], _rounding(model, logits))
    if tail is None:
        raise CaptureError(
            f"no modules of {type(model).__name__} give its logits from what its final reader reads, so it has no lens "
            "and no attribution; capture it without them in keep."
        )
    return tail


def _rounding(model: nn.Module, logits: Tensor) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} | {logits.dtype}
    return ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes)


class _Step(NamedTuple):
    """One module's call, one vector per token in and out."""

    module: nn.Module
    read: Tensor
    written: Tensor


class _Watch:
    """Watches what runs from the final reader on, for one forward pass over one prompt."""

    def __init__(self, final: int, shape: Sequence[int]) -> None:
        self.final, self.shape = Event("reader", final), tuple(shape)
        self.read: Tensor | None = None
        self.calls: list[_Step] = []

    @contextmanager
    def attached(self, model: nn.Module, layout: Layout) -> Iterator[None]:
        """Hooks on the taps and on every module, removed on the way out."""
        handles = []
        try:
            with attached(layout.taps, self._receive):
                handles += [m.register_forward_hook(self._after, with_kwargs=True) for m in model.modules()]
                yield
        finally:
            for handle in handles:
                handle.remove()

    def tail(self, logits: Tensor, rounding: float) -> Tail | None:
        """The way from the final reader to the logits; None if no calls make it up."""
        for head in sorted(reversed(self.calls), key=lambda step: not is_matrix(step.module)):
            if head.written.shape[-1] < logits.shape[-1]:
                continue
            finish = _finish(head.written[:, : logits.shape[-1]], logits, rounding)
            found = self._steps_to(head.read, rounding) if finish else None
            if found is None:
                continue
            steps, scale = found
            norm = norm_of(_as_call(steps[0])) if len(steps) == 1 else None
            modules = tuple(step.module for step in steps)
            tail = Tail(modules, scale, head.module, finish, logits.shape[-1], norm, self.read.dtype, _autocast(logits))
            if _miss(tail(self.read), logits) <= rounding:
                return tail
        return None

    def _steps_to(self, goal: Tensor, rounding: float) -> tuple[tuple[_Step, ...], float] | None:
        """The shortest chain of calls from the final reader's input to a value, and a scale after it."""
        reached: list[tuple[Tensor, tuple[_Step, ...]]] = [(self.read, ())]
        for value, chain in reached:
            if torch.equal(value, goal):
                return chain, 1.0
            if value.shape == goal.shape and _miss((scale := _scale(value, goal)) * value, goal) <= rounding:
                return chain, scale
            for step in self.calls:
                known = any(torch.equal(step.written, other) for other, _ in reached)
                if not known and torch.equal(step.read, value):
                    reached.append((step.written, (*chain, step)))
        return None

    def _receive(self, event: Event, value: Tensor) -> None:
        if event == self.final:
            self.read = value.flatten(0, -2)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]
        if self.read is None or not inputs or not isinstance(output, Tensor):
            return
        if all(value.ndim == 3 and value.shape[:2] == self.shape for value in (inputs[0], output)):
            self.calls.append(_Step(module, inputs[0][0], output[0]))


def _autocast(like: Tensor) -> torch.dtype | None:
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_matrix(module: nn.Module) -> bool:
    """Whether all it has is a matrix, perhaps with a bias."""
    return sorted(name for name, _ in module.named_parameters()) in (["weight"], ["bias", "weight"]) and (
        module.weight.ndim == 2
    )


def _as_call(step: _Step) -> Call:
    return Call("", step.module, 0, (), 0, read=step.read.cpu(), written=step.written.cpu())


def _finish(raw: Tensor, logits: Tensor, rounding: float) -> Finish | None:
    """What turns the head's output into the logits: nothing, a scale or a soft cap; None if neither fits."""
    raw, logits = raw.double(), logits.double()
    at = raw.abs().argmax()
    cap = _cap(abs(float(raw.flatten()[at])), abs(float(logits.flatten()[at])))
    forms = [Finish(), Finish(scale=_scale(raw, logits)), *([Finish(cap=cap)] if cap else [])]
    misses = [_miss(form(raw), logits) for form in forms]
    return forms[misses.index(min(misses))] if min(misses) <= rounding else None


def _scale(value: Tensor, goal: Tensor) -> float:
    """The best c with ``c value = goal``."""
    value, goal = value.double(), goal.double()
    return float((value * goal).sum() / value.square().sum())


def _cap(raw: float, capped: float) -> float | None:
    """The c with ``c tanh(raw / c) = capped``, by bisection; None if there is none."""
    if not 0 < capped < raw < math.inf:
        return None
    low, high = math.log(capped), math.log(capped) + 30
    for _ in range(100):
        middle = (low + high) / 2
        above = math.exp(middle) * math.tanh(raw / math.exp(middle)) > capped
        low, high = (low, middle) if above else (middle, high)
    fitted = math.exp((low + high) / 2)
    whole = round(fitted, 1)  # caps are round numbers, and what shows of a weak one has rounding
    return whole if abs(fitted - whole) < 1e-4 * fitted else fitted


def _miss(ours: Tensor, logits: Tensor) -> float:
    """Largest relative error over tokens; infinite where it is no number."""
    ours, logits = ours.double(), logits.double()
    error = (ours - logits).norm(dim=-1) / logits.norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())
