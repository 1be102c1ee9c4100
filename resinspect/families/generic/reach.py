"""Whether all that is written comes from the readers that were found, or also from a read that nobody saw.

A sublayer that gets ``norm(h)`` from a plain function, or ``h`` with something done to it, reads without a module that
reads the residual. Its write would then stand beside another sublayer's reader. So the model runs twice more: every
reader is given what it read before, every layer another residual and other tokens. What is written must then stay the
same.
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

SMALLEST = 1e-5
"""A smaller relative change is rounding; in half precision, a few units of its rounding."""
ROUNDINGS = 8.0


def unseen_read(model: nn.Module, probe: Probe, steps: list[Step]) -> str:
    """One clause that names a write which depends on more than what the readers read; empty if there is none."""
    one, other = (_writes(model, probe, steps, seed) for seed in (1, 2))
    for write, values in one.items():
        if any(_differ(value, changed) for value, changed in zip(values, other[write], strict=True)):
            again = _writes(model, probe, steps, 1)[write]
            if any(_differ(value, changed) for value, changed in zip(values, again, strict=True)):
                return f"what {write.path!r} gives differs between two runs on the same input"
            return (
                f"what {write.path!r} gives comes not only from modules that read the residual: a norm without a "
                "module, something done to the residual before it is read, or tokens that come in beside it"
            )
    return ""


def _differ(value: Tensor, changed: Tensor) -> bool:
    limit = max(SMALLEST, ROUNDINGS * torch.finfo(value.dtype).eps)
    change = (value.double() - changed.double()).norm(dim=-1)
    return bool((change > limit * value.double().norm(dim=-1)).any())


def _writes(model: nn.Module, probe: Probe, steps: list[Step], seed: int) -> dict[Call, list[Tensor]]:
    """Output and input of every write when its readers read what they did, and layers get vectors of a seed.

    The tokens of another seed come in another order.

    The input counts too, for modules whose weights are still zero.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = probe.ids if seed == 1 else probe.ids.flip(-1)
    inputs = {c: torch.randn(c.read.shape, generator=generator) for c in probe.layers}
    inputs |= {reader: reader.read for step in steps for reader in step.readers}
    written: dict[Call, list[Tensor]] = {}
    with evaluating(model), _attached(inputs, [w.call for step in steps for w in step.writes], written):
        call(model, ids, use_cache=False, return_dict=True)
    return written


@contextmanager
def _attached(inputs: dict[Call, Tensor], writes: list[Call], written: dict[Call, list[Tensor]]) -> Iterator[None]:
    handles = []
    try:
        for module in {c.module for c in inputs}:
            mine = {c.number: (c, value) for c, value in inputs.items() if c.module is module}
            handles.append(module.register_forward_pre_hook(_give(mine), with_kwargs=True))
        for module in {c.module for c in writes}:
            mine = {c.number: c for c in writes if c.module is module}
            handles.append(module.register_forward_hook(_take(mine, written), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _give(mine: dict[int, tuple[Call, Tensor]]) -> Any:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, value = mine.get(next(numbers), (None, None))
        if at is None:
            return None
        slot, old = first_input(args, kwargs, value.shape[-1])
        return None if old is None else replaced(args, kwargs, slot, value.view(old.shape).to(old, copy=True))

    return hook


def _take(mine: dict[int, Call], written: dict[Call, list[Tensor]]) -> Any:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        at = mine.get(next(numbers))
        if at is not None:
            _, got = first_input(args, kwargs, at.written.shape[-1])
            given = output if at.item is None else output[at.item]
            written[at] = [value.detach().clone() for value in (given, got) if value is not None]

    return hook
