"""Families of models: one file each, and one line here. The first that recognises a model describes it."""

from torch import nn

from resinspect.errors import CaptureError
from resinspect.families import plain, reference
from resinspect.families.layout import Event, Family, Layout, Seen, Tap
from resinspect.families.named import Sublayers, name_layout

FAMILIES: dict[str, Family] = {
    "reference": Family(
        reference.recognise, "a connection of resinspect.models", "scalar per token", "attn, mlp", 1e-5
    ),
    "plain": Family(plain.recognise, "h + v", "static scalar", "attn, mlp", 1e-6),
}

__all__ = ["FAMILIES", "Event", "Family", "Layout", "Seen", "Sublayers", "Tap", "find_layout", "name_layout"]


def find_layout(model: nn.Module) -> Layout:
    """The layout of a model of a known family.

    Raises:
        CaptureError: If no family recognises it; the message says what was found and how to name sublayers.
    """
    for family in FAMILIES.values():
        if layout := family.recognise(model):
            return layout
    raise CaptureError(
        f"{type(model).__name__} belongs to no known family ({', '.join(FAMILIES)}); {_layers_of(model)} "
        'Name its sublayers yourself: method="solve", sublayers=[("layers.*.attn", "layers.*.norm1"), ...], '
        'final="norm", each pair a module whose output is written and the module that reads.'
    )


def _layers_of(model: nn.Module) -> str:
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return "it has no list of layers."
    name, layers = max(lists, key=lambda item: len(item[1]))
    children = ", ".join(f"{child} ({type(module).__name__})" for child, module in layers[0].named_children())
    return f"its list {name!r} holds {len(layers)} {type(layers[0]).__name__} with {children or 'no children'}."
