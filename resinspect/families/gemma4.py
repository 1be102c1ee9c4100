"""Gemma 4: sandwich norms, a per-layer embedding that writes, and a scalar on the whole stream after each layer."""

from torch import Tensor, nn

from resinspect.families.layout import Layout
from resinspect.families.stack import SANDWICH, Sublayer, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.families.weighted import Weighted

PLE = Sublayer("ple", "per_layer_input_gate", "post_per_layer_input_norm")
"""The per-layer embedding: it reads the residual without a norm, gates with it, and writes."""
PLE_BLOCK = Sublayer("ple", f"ple_block.{PLE.read}", f"ple_block.{PLE.write}")
"""The same in a module of its own (EmbeddingGemma 2)."""


def recognise(model: nn.Module) -> Layout | None:
    """The layout of sandwich layers with a buffer ``layer_scalar``, with or without per-layer embeddings."""
    stack = find_stack(model, (*parts_of(SANDWICH), "layer_scalar"))
    if stack is None or not all(_is_scalar(layer.layer_scalar) for layer in stack.layers):
        return None
    sublayers = _sublayers(stack.layers[0])
    if sublayers is None or any(_sublayers(layer) != sublayers for layer in stack.layers):
        return None
    anatomy = sequence_of(stack, sublayers)
    scalars = {
        site.index: stack.layers[site.layer].layer_scalar.reshape(())
        for site in anatomy.sites
        if site.kind == sublayers[-1].kind
    }
    return Layout(
        family="gemma4",
        scheme="layer_scalar",
        anatomy=anatomy,
        taps=tuple(sequence_taps(stack, anatomy, sublayers)),
        connection=Weighted(keep=scalars, add=scalars),
        write_definition="output of the norm after attention, after the MLP (experts included) and after the PLE",
        source_definition="source 0 is the scaled token embedding",
    )


def _sublayers(layer: nn.Module) -> tuple[Sublayer, ...] | None:
    """Those of one layer, or None if it has a per-layer embedding of another form."""
    modules = dict(layer.named_modules())
    for ple in (PLE, PLE_BLOCK):
        if all(path in modules for path in ple[1:]):
            return (*SANDWICH, ple)
    other = any(name.startswith(("ple", "per_layer")) for path in modules for name in path.split("."))
    return None if other else SANDWICH


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
