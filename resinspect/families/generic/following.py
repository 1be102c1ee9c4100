"""One probe of a model for all who ask within one search for its family."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from torch import nn

from resinspect.families.generic.copies import copied
from resinspect.families.generic.multipliers import exact
from resinspect.families.generic.probe import Probe, probe
from resinspect.families.generic.reach import unseen_read
from resinspect.families.generic.residual import Residual, follow

_SEEN: ContextVar[dict[object, Probe | Residual] | None] = ContextVar("seen", default=None)


@contextmanager
def probing_once() -> Iterator[None]:
    """Within this context every model is probed at most once; it must not change."""
    token = _SEEN.set({})
    try:
        yield
    finally:
        _SEEN.reset(token)


def followed(model: nn.Module, *, norms: bool) -> Residual:
    """The residual of a model, as far as it can be followed.

    Args:
        model: Any module.
        norms: Whether the residual itself may be normed.
    """
    seen = _SEEN.get()
    seen = {} if seen is None else seen
    if model not in seen:
        seen[model] = probe(model)
    if (model, norms) not in seen:
        found = follow(seen[model], norms=norms)
        config = getattr(model, "config", None)
        layers = found.probe.layers
        steps = [exact(step, layers[step.layer].module, layers[step.layer].path, config) for step in found.steps]
        why = found.why or unseen_read(model, found.probe, steps) or copied(model, found.probe, steps)
        seen[model, norms] = replace(found, steps=steps, why=why)
    return seen[model, norms]


def why_not(model: nn.Module) -> str:
    """One clause that says how far the residual of a model was followed, and what was in the way."""
    return max((followed(model, norms=norms) for norms in (False, True)), key=lambda found: len(found.steps)).why
