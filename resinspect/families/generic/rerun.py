"""Running a probed model once more, with what some calls get replaced and what some modules give held."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.families.forward import call, evaluating
from resinspect.families.generic.probe import Call, first_input, replaced

Hook = tuple[nn.Module, str, Any]
Outputs = dict[nn.Module, list[Any]]
"""What modules gave, call by call."""


def vectors(calls: Iterable[Call], seed: int) -> dict[Call, Tensor]:
    """Random vectors for calls to get in place of what they read."""
    generator = torch.Generator().manual_seed(seed)
    return {c: torch.randn(c.read.shape, generator=generator) for c in calls}


def rerun(
    model: nn.Module, ids: Tensor, inputs: Mapping[Call, Tensor], watched: Iterable[Call], held: Outputs | None = None
) -> dict[Call, list[Tensor]]:
    """One forward pass in which some calls get other inputs.

    Args:
        model: The model that was probed.
        ids: Token ids of the probe, perhaps in another order.
        inputs: What calls get in place of what they read.
        watched: Calls to report on.
        held: What modules give in place of what they compute.

    Returns:
        For each watched call what it gave and what it got, as far as each is a vector per token.
    """
    seen: dict[Call, list[Tensor]] = {}
    with evaluating(model), _attached([*_give(inputs), *_watch(watched, seen), *_hold(held or {})]):
        call(model, ids, use_cache=False, return_dict=True)
    return seen


def outputs_of(model: nn.Module, ids: Tensor, modules: Iterable[nn.Module]) -> Outputs:
    """What modules give in one forward pass; the model may go on to overwrite it, so these are copies."""
    found: Outputs = {module: [] for module in modules}

    def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found[module].append(_copy(output))

    with evaluating(model), _attached([(module, "register_forward_hook", keep) for module in found]):
        call(model, ids, use_cache=False, return_dict=True)
    return found


@contextmanager
def _attached(hooks: Iterable[Hook]) -> Iterator[None]:
    handles = []
    try:
        for module, kind, hook in hooks:
            handles.append(getattr(module, kind)(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _give(inputs: Mapping[Call, Tensor]) -> Iterator[Hook]:
    for module, mine in _by_module(inputs).items():
        numbers = count()

        def hook(_: nn.Module, args: Any, kwargs: Any, mine: Any = mine, numbers: Any = numbers) -> Any:
            at = mine.get(next(numbers))
            if at is None:
                return None
            slot, old = first_input(args, kwargs, at.read.shape[-1])
            return None if old is None else replaced(args, kwargs, slot, inputs[at].view(old.shape).to(old, copy=True))

        yield module, "register_forward_pre_hook", hook


def _watch(watched: Iterable[Call], seen: dict[Call, list[Tensor]]) -> Iterator[Hook]:
    for module, mine in _by_module(watched).items():
        numbers = count()

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, mine: Any = mine, numbers: Any = numbers) -> None:
            at = mine.get(next(numbers))
            if at is not None:
                given = output if at.item is None else output[at.item]
                _, got = first_input(args, kwargs, at.written.shape[-1])
                seen[at] = [value.detach().clone() for value in (given, got) if value is not None]

        yield module, "register_forward_hook", hook


def _hold(held: Outputs) -> Iterator[Hook]:
    for module, outputs in held.items():
        left = iter(outputs)
        yield module, "register_forward_hook", lambda *_, left=left: _copy(next(left, None))


def _by_module(calls: Iterable[Call]) -> dict[nn.Module, dict[int, Call]]:
    """The calls of each module by how often it ran before."""
    found: dict[nn.Module, dict[int, Call]] = defaultdict(dict)
    for at in calls:
        found[at.module][at.number] = at
    return found


def _copy(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) else output
