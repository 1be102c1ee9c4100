"""Models whose modules sit inside wrappers: a TransformerBridge, compiled layers, checkpointed layers.

A family knows a model by the names of its modules, so it is shown the model without wrappers: a copy of the tree, which
shares every parameter. What it wants to see is then seen at the wrapper, which is what the model calls.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from resinspect.families.layout import Layout

INSIDE = ("_orig_mod", "_original_component", "_checkpoint_wrapped_module")
"""Where wrappers keep what they wrap: torch.compile, transformer_lens, torch's activation checkpointing."""


def bridged(model: nn.Module) -> nn.Module:
    """The Hugging Face model that a TransformerBridge runs, with the bridge's parts inside; any other model itself."""
    inside = getattr(model, "original_model", None)
    return inside if isinstance(inside, nn.Module) and hasattr(model, "adapter") else model


def recognise_wrapped(model: nn.Module, recognise: Callable[[nn.Module], Layout]) -> Layout:
    """The layout of a model, as if nothing in it were wrapped.

    Args:
        model: Any module.
        recognise: Gives the layout of a model without wrappers.
    """
    bare: dict[nn.Module, nn.Module] = {}
    layout = recognise(_bare(model, bare))
    called = {inner: outer for outer, inner in bare.items()}
    return replace(layout, taps=tuple(replace(tap, module=called.get(tap.module, tap.module)) for tap in layout.taps))


def _bare(module: nn.Module, bare: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module without wrappers, also inside: itself if there are none. ``bare`` remembers it for each module seen."""
    if module in bare:
        return bare[module]
    inner = module
    while wrapped := next((inner._modules[name] for name in INSIDE if inner._modules.get(name) is not None), None):
        inner = wrapped
    children = {name: None if child is None else _bare(child, bare) for name, child in inner._modules.items()}
    if inner is not module or any(children[name] is not child for name, child in inner._modules.items()):
        inner = copy.copy(inner)
        inner.__dict__["_modules"] = children
    bare[module] = inner
    return inner
