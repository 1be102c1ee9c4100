"""Attaching to a model for the length of one capture, and leaving nothing behind."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Tap

_ONE_AT_A_TIME = threading.RLock()


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


def _on_input(tap: Tap, receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        receive(tap.event, _tensor(tap, args[0] if args else _only_hidden(tap, kwargs)))

    return hook


def _on_output(tap: Tap, receive: Callable[[Event, Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        receive(tap.event, _tensor(tap, output))

    return hook


def _only_hidden(tap: Tap, kwargs: dict[str, Any]) -> Any:
    """The residual among keyword arguments: ``hidden_states``, or the only tensor that can be one."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    tensors = [v for v in kwargs.values() if isinstance(v, Tensor) and v.is_floating_point() and v.ndim >= 3]
    if len(tensors) != 1:
        raise CaptureError(
            f"{tap.path!r} gets only keyword arguments ({', '.join(kwargs) or 'none'}), and which of them is the "
            "residual cannot be told; name a module that gets it as its first argument."
        )
    return tensors[0]


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
