"""Norms by what they do: each token's vector, perhaps centred, times one number per token and one per channel."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from resinspect.families.generic.probe import Call


@dataclass(frozen=True, eq=False)
class Norm:
    """``(x - mean) rstd gain + bias``, with ``rstd`` of the token.

    Attributes:
        call: The call that it was recognised by.
        gain: ``(channel)``, None for 1.
        bias: ``(channel)``, None for 0.
        centre: Whether the mean is taken off.
        parameters: Names of the model's parameters behind ``gain``.
    """

    call: Call
    gain: Tensor | None
    bias: Tensor | None
    centre: bool
    parameters: tuple[str, ...]

    def rstd(self, x: Tensor, y: Tensor) -> Tensor:
        """The number of each token, from what went in and what came out: ``(..., channel)`` gives ``(...)``."""
        return _rstd(self._direction(x), _without(y, self.bias))

    def _direction(self, x: Tensor) -> Tensor:
        x = _wide(x)
        x = x - x.mean(-1, keepdim=True) if self.centre else x
        return x if self.gain is None else x * self.gain.to(x.device, x.dtype)

    def holds(self) -> bool:
        """Whether the recorded call is this norm, up to its rounding."""
        x, y = self.call.read.double(), _without(self.call.written.double(), self.bias)
        along = self._direction(x)
        error = (along * _rstd(along, y)[..., None] - y).norm(dim=-1) / y.norm(dim=-1)
        return bool((error <= 2 * torch.finfo(self.call.written.dtype).eps).all())


def norm_of(call: Call) -> Norm | None:
    """The norm that a call is, or None."""
    if call.read is None or call.written is None or call.read.shape != call.written.shape or not call.leaf:
        return None
    return next((norm for norm in _forms(call) if norm.holds()), None)


def _forms(call: Call) -> Iterator[Norm]:
    """A norm's gain is its weight, or 1 plus its weight, or 1."""
    vectors = dict(call.module.named_parameters(recurse=False))
    if any(value.shape != call.read.shape[-1:] for value in vectors.values()):
        return
    bias = vectors.pop("bias", None)
    names = tuple(f"{call.path}.{name}" for name in vectors)
    gains = [value.detach() for value in vectors.values()]
    if len(gains) > 1:
        return
    for gain in (gains[0], 1 + gains[0]) if gains else (None,):
        for centre in (False, True):
            yield Norm(call, gain, None if bias is None else bias.detach(), centre, names)


def _rstd(direction: Tensor, y: Tensor) -> Tensor:
    return (direction * y).sum(-1) / direction.square().sum(-1)


def _without(y: Tensor, bias: Tensor | None) -> Tensor:
    y = _wide(y)
    return y if bias is None else y - bias.to(y.device, y.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
