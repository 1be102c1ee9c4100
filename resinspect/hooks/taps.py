"""Attaching to a model for the length of one capture, and leaving nothing behind."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Seen, Tap
from resinspect.families.layout import put_argument

Receive = Callable[[Event, Tensor], Tensor | None]
"""Takes what a tap saw; a tensor that it returns takes its place in the model."""


@contextmanager
def attached(taps: Sequence[Tap], receive: Receive) -> Iterator[None]:
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


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile`` and data-parallel wrappers.

    Raises:
        CaptureError: If it is no module, or one of TorchScript, whose own modules take no hooks.
    """
    while True:
        if not isinstance(model, nn.Module):
            hint = "; ri.load returns (model, tokenizer)" if isinstance(model, tuple) else ""
            raise CaptureError(f"the model is a {type(model).__name__}, not a torch.nn.Module{hint}.")
        if isinstance(model, torch.jit.ScriptModule):
            raise CaptureError("the model is a TorchScript module, which cannot be hooked; give the one it came from.")
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def _before(taps: list[Tap], receive: Receive) -> Callable[..., Any]:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen = Seen(args, kwargs, None)
        edited = _emit(taps, next(numbers), seen, receive)
        return None if edited is seen else (edited.args, edited.kwargs)

    return hook


def _after(taps: list[Tap], receive: Receive) -> Callable[..., Any]:
    numbers = count()

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        seen = Seen(args, kwargs, output)
        edited = _emit(taps, next(numbers), seen, receive)
        return None if edited is seen else edited.output

    return hook


def _emit(taps: list[Tap], number: int, seen: Seen, receive: Receive) -> Seen:
    last = max(tap.call for tap in taps)
    if number > last:
        path = taps[0].path.partition("@")[0]
        raise CaptureError(
            f"module {path!r} ran a {_ordinal(number + 1)} time in one forward pass, but its layout knows only "
            f"{last + 1}; name every call of a looped or shared module in sublayers= and final=: '{path}@{number}' is "
            "this one."
        )
    for tap in taps:
        if tap.call == number and tap.event is not None:
            value = receive(tap.event, value_at(tap, seen))
            seen = seen if value is None else put_at(tap, seen, value)
    return seen


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


def put_at(tap: Tap, seen: Seen, value: Tensor) -> Seen:
    """The same call with another tensor where the tap's was seen."""
    if tap.put is not None:
        return tap.put(seen, value)
    if tap.side == "output":
        whole = not (isinstance(seen.output, tuple) and seen.output)
        return seen._replace(output=value if whole else (value, *seen.output[1:]))
    if seen.args:
        return put_argument(seen, value)
    old = _only_hidden(tap, seen)
    return seen._replace(kwargs={name: value if v is old else v for name, v in seen.kwargs.items()})


def value_at(tap: Tap, seen: Seen) -> Tensor:
    """What a tap sees in a call.

    Raises:
        CaptureError: If it is no tensor.
    """
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
