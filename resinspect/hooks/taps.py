"""Attaching to a model for the length of one capture, and leaving nothing behind."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Tap


@contextmanager
def attached(taps: Sequence[Tap], receive: Callable[[Event, Tensor], None]) -> Iterator[None]:
    """Call ``receive(event, tensor)`` whenever a tap's module runs; every hook is removed on the way out."""
    handles = []
    try:
        for tap in taps:
            if tap.side == "input":
                handle = tap.module.register_forward_pre_hook(_on_input(tap, receive), with_kwargs=True)
            else:
                handle = tap.module.register_forward_hook(_on_output(tap, receive))
            handles.append(handle)
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run without gradients and dropout; each module's training flag is restored afterwards."""
    flags = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in flags.items():
            module.training = training


def _on_input(tap: Tap, receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else next(iter(kwargs.values()), None)
        receive(tap.event, _tensor(tap, value))

    return hook


def _on_output(tap: Tap, receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        receive(tap.event, _tensor(tap, output))

    return hook


def _tensor(tap: Tap, value: Any) -> Tensor:
    if tap.pick is not None:
        value = tap.pick(value)
    elif isinstance(value, tuple) and value:
        value = value[0]
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"the {tap.side} of {tap.path!r} is a {type(value).__name__}, not a tensor; "
            "name the module whose value is the residual itself."
        )
    return value
