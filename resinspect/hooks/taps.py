"""Attaching to a model for the length of one capture, and leaving nothing behind."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Seen, Tap

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def attached(taps: Sequence[Tap], receive: Callable[[Event, Tensor], None]) -> Iterator[None]:
    """Call ``receive(event, tensor)`` whenever a tap's module runs; every hook is removed on the way out."""
    places: dict[tuple[nn.Module, str], list[Tap]] = defaultdict(list)
    for tap in taps:
        places[tap.module, tap.side].append(tap)
    handles = []
    try:
        for (module, side), here in places.items():
            if side == "input":
                handle = module.register_forward_pre_hook(_before(here, receive), with_kwargs=True)
            else:
                handle = module.register_forward_hook(_after(here, receive), with_kwargs=True)
            handles.append(handle)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run eagerly, without gradients and dropout; each module's training flag is restored afterwards.

    One at a time: the hooks of two captures on one model would see each other's forward.
    """
    with _ONE_AT_A_TIME:
        flags = {module: module.training for module in model.modules()}
        try:
            model.eval()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module, training in flags.items():
                module.training = training


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile`` and data-parallel wrappers."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def _before(taps: list[Tap], receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _emit(taps, next(numbers), Seen(args, kwargs, None), receive)

    return hook


def _after(taps: list[Tap], receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _emit(taps, next(numbers), Seen(args, kwargs, output), receive)

    return hook


def _emit(taps: list[Tap], number: int, seen: Seen, receive: Callable[[Event, Tensor], None]) -> None:
    last = max(tap.call for tap in taps)
    if number > last:
        raise CaptureError(
            f"module {taps[0].path!r} ran a {_ordinal(number + 1)} time in one forward pass, but its layout knows only "
            f"{last + 1}; shared, looped or reordered modules need a layout that says so."
        )
    for tap in taps:
        if tap.call == number:
            receive(tap.event, _tensor(tap, seen))


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _only_hidden(tap: Tap, seen: Seen) -> Any:
    """The residual among the inputs: the first, or ``hidden_states``, or the only tensor that can be one."""
    args, kwargs = seen.args, seen.kwargs
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    tensors = [v for v in kwargs.values() if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 3]
    if len(tensors) != 1:
        raise CaptureError(
            f"{tap.path!r} gets only keyword arguments ({', '.join(kwargs) or 'none'}), and which of them is the "
            "residual cannot be told; name a module that gets it as its first argument."
        )
    return tensors[0]


def _tensor(tap: Tap, seen: Seen) -> Tensor:
    if tap.pick is not None:
        value = tap.pick(seen)
    elif tap.side == "input":
        value = _only_hidden(tap, seen)
    else:
        value = seen.output[0] if isinstance(seen.output, tuple) and seen.output else seen.output
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"the {tap.side} of {tap.path!r} is a {type(value).__name__}, not a tensor; "
            "name the module whose value is the residual itself."
        )
    return value
