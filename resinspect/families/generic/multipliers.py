"""Measured weights, replaced by the number in the model that they are."""

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from resinspect.families.generic.explain import ONE, Weight
from resinspect.families.generic.residual import Step

STANDARD_ERRORS = 10.0
ROUNDING = 1e-12


def exact(step: Step, layer: nn.Module, path: str, config: object) -> Step:
    """A step whose weights are 1, or a number that its layer or the configuration holds, where they are that close."""
    numbers = list(_numbers(layer, path, config))
    writes = tuple(replace(write, weight=_nearest(write.weight, numbers)) for write in step.writes)
    return replace(step, keep=_nearest(step.keep, numbers), writes=writes)


def _nearest(weight: Weight, numbers: list[tuple[float, str]]) -> Weight:
    def distance(number: float) -> float:
        return abs(weight.value - number)

    tolerance = max(STANDARD_ERRORS * weight.error, ROUNDING * abs(weight.value))
    if distance(1.0) <= tolerance:
        return ONE
    near = [(distance(number), number, name) for number, name in numbers if distance(number) <= tolerance]
    if not near:
        return weight
    _, number, name = min(near)
    return Weight(number, 0.0, name)


def _numbers(layer: nn.Module, path: str, config: object) -> Iterator[tuple[float, str]]:
    """Numbers a weight might be, each with the name of the parameter that it is, if it is one."""
    for name, value in layer.named_parameters():
        if value.numel() == 1:
            yield float(value.detach()), f"{path}.{name}"
    own, general = _settings(layer), _settings(config)
    plain = {0.5, 2.0, *(v for v in (*own, *general) if isinstance(v, float))}
    plain |= {float(b) for b in layer.buffers() if b.numel() == 1}
    for value in plain - {0.0}:
        yield from ((sign * number, "") for sign in (1, -1) for number in (value, 1 / value))
    # Over the root of a number of layers, as in 1 / sqrt(2 L).
    counts = {v for v in own if isinstance(v, int) and 1 < v < 1000} | {getattr(config, "num_hidden_layers", 0)} - {0}
    for count in {n * c for n in (1, 2) for c in counts}:
        yield from ((value / math.sqrt(count), "") for value in (1.0, *plain))


def _settings(holder: object) -> list[int | float]:
    values = vars(holder).values() if hasattr(holder, "__dict__") else ()
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]
