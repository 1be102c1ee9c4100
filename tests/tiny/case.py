"""What a tiny model is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Tiny:
    """A tiny random model of one family.

    Attributes:
        family: Row of ``FAMILIES`` that must recognise it.
        name: Of the case, unique.
        build: Gives the model, in float32 and evaluation mode, its routing far from trivial; raises what the installed
            transformers raises where it has no such model.
        plain: Whether its W is 1 everywhere, so that the null hypothesis W = 1 holds.
        scalar: Whether one scalar per source and token says all, so that W can be solved.
        causal: Whether it is a decoder: next-token loss and generation make sense.
        cached: Whether its forward gives a key-value cache to go on from.
    """

    family: str
    name: str
    build: Callable[[], nn.Module]
    plain: bool = False
    scalar: bool = True
    causal: bool = True
    cached: bool = True

    def __str__(self) -> str:
        return self.name


def randomised(model: nn.Module, scale: float = 0.2, *, seed: int = 0) -> nn.Module:
    """Every floating-point parameter moved far from its start: gates open, queries non-zero, norms uneven."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model.eval()
