"""Any stack of layers that adds up what its modules give, with weights that never change, whatever their names.

Llama, GPT-2, OLMo 2 (normed writes), Cohere (attention and MLP side by side), Granite (multipliers) and their like:
the residual is followed through one small probe, and the fidelity of every capture says whether what was found holds.
"""

from torch import nn

from resinspect.families.generic import Residual, followed, layout_of
from resinspect.families.layout import Layout


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a model whose residual is the sum of what is written."""
    found = followed(model, norms=False)
    return None if found.why or _multiplies(found) else layout_of(found, "plain")


def recognise_scaled(model: nn.Module) -> Layout | None:
    """The layout of a model that multiplies its residual or its writes by fixed numbers."""
    found = followed(model, norms=False)
    return layout_of(found, "scaled") if not found.why and _multiplies(found) else None


def _multiplies(found: Residual) -> bool:
    return any(w.value != 1 for step in found.steps for w in (step.keep, *(write.weight for write in step.writes)))
