"""Any stack of layers that norms the residual itself: BERT, BART, the first GPT. W holds given the norms' scales."""

from torch import nn

from resinspect.families.generic import followed, layout_of
from resinspect.families.layout import Layout


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a model that carries on what its norms give."""
    found = followed(model, norms=True)
    return None if found.why or not any(step.norm for step in found.steps) else layout_of(found, "post_norm")
