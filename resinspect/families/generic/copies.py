"""Whether a module that reads the residual hands it on within what it gives, by a weight that no number describes.

``explain`` finds a copy with one weight for all tokens and channels. A weight per token or channel, such as the share
of an identity expert, hides in the write, and every weight of earlier sources is then too small. So such modules run
with the outputs of all modules inside them held at what they were, on other inputs: what still changes by a fixed
multiple of each element of the input is a copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.families.forward import call, evaluating
from resinspect.families.generic.probe import Call, Probe, first_input, replaced
from resinspect.families.generic.residual import Step

CLOSE = 1e-3
"""Relative agreement of the multiples that two inputs give; they are ratios of differences."""
SMALLEST = 1e-5
"""Smaller multiples are rounding."""


def copied(model: nn.Module, probe: Probe, steps: list[Step]) -> str:
    """One clause that names a write which holds the residual; empty if there is none."""
    suspects = [
        write.call
        for step in steps
        for write in step.writes
        if write.call in step.readers and not write.call.leaf and write.call.read is not None
    ]
    if not suspects:
        return ""
    inside = {module for suspect in suspects for module in suspect.module.modules() if not [*module.children()]}
    held: dict[nn.Module, list[Any]] = {module: [] for module in inside}
    with evaluating(model), _attached(_keep(held)):
        call(model, probe.ids, use_cache=False, return_dict=True)
    runs = [_run(model, probe, suspects, held, seed) for seed in (0, 1, 2)]
    for suspect in suspects:
        (x, y), *others = (run[suspect] for run in runs)
        one, two = ((b - y) / (a - x) for a, b in others)
        alike = (one - two).abs() <= CLOSE * one.abs()
        if bool((alike & (one.abs() > SMALLEST)).float().mean() > 0.5):
            return (
                f"what {suspect.path!r} gives holds the residual itself, times a weight that differs between tokens or "
                "channels"
            )
    return ""


def _run(
    model: nn.Module, probe: Probe, suspects: list[Call], held: dict[nn.Module, list[Any]], seed: int
) -> dict[Call, tuple[Tensor, Tensor]]:
    """Input and output of every suspect, in float64, when it gets vectors of a seed and its inside is held."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {s: torch.randn(s.read.shape, generator=generator) for s in suspects}
    found: dict[Call, tuple[Tensor, Tensor]] = {}
    with evaluating(model), _attached([*_give(inputs, found), *_hold(held)]):
        call(model, probe.ids, use_cache=False, return_dict=True)
    return found


@contextmanager
def _attached(hooks: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    handles = []
    try:
        for module, kind, hook in hooks:
            handles.append(getattr(module, kind)(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(held: dict[nn.Module, list[Any]]) -> list[tuple[nn.Module, str, Any]]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        held[module].append(_copy(output))

    return [(module, "register_forward_hook", hook) for module in held]


def _hold(held: dict[nn.Module, list[Any]]) -> list[tuple[nn.Module, str, Any]]:
    def hook_of(outputs: list[Any]) -> Any:
        left = iter(outputs)
        return lambda *_: _copy(next(left, None))

    return [(module, "register_forward_hook", hook_of(outputs)) for module, outputs in held.items()]


def _copy(output: Any) -> Any:
    """The model may go on to overwrite it."""
    return output.clone() if isinstance(output, Tensor) else output


def _give(inputs: dict[Call, Tensor], found: dict[Call, tuple[Tensor, Tensor]]) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in {suspect.module for suspect in inputs}:
        mine = {suspect.number: suspect for suspect in inputs if suspect.module is module}
        before, after = count(), count()

        def give(_: nn.Module, args: Any, kwargs: Any, mine: Any = mine, numbers: Any = before) -> Any:
            at = mine.get(next(numbers))
            if at is None:
                return None
            slot, old = first_input(args, kwargs, at.read.shape[-1])
            return None if old is None else replaced(args, kwargs, slot, inputs[at].view(old.shape).to(old))

        def take(_: nn.Module, args: Any, kwargs: Any, output: Any, mine: Any = mine, numbers: Any = after) -> None:
            at = mine.get(next(numbers))
            if at is not None:
                value = output if at.item is None else output[at.item]
                found[at] = (inputs[at].double(), value.detach().cpu().double().view(at.written.shape))

        yield module, "register_forward_pre_hook", give
        yield module, "register_forward_hook", take
