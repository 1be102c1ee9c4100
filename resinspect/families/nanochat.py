"""NanoChat: plain pre-norm layers whose norms hold nothing; one norm serves the embedding and the readout."""

from torch import nn

from resinspect.families.layout import Layout
from resinspect.families.stack import PRE_NORM, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.program import Connection


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers with norms without parameters around attention with query and key norms and a plain MLP."""
    stack = find_stack(model, parts_of(PRE_NORM))
    if stack is None or not all(_is_layer(layer) for layer in stack.layers):
        return None
    if _parameters(model.get_submodule(stack.under("norm"))):
        return None
    anatomy = sequence_of(stack, PRE_NORM)
    return Layout(
        family="nanochat",
        scheme="pre_ln",
        anatomy=anatomy,
        # The norm runs first on the embedding, then on the readout; a model without the first call is refused there.
        taps=tuple(sequence_taps(stack, anatomy, PRE_NORM, final_call=1)),
        connection=Connection(),
        write_definition="output of the attention and MLP modules",
        source_definition="source 0 is the normed token embedding",
    )


def _is_layer(layer: nn.Module) -> bool:
    """NanoChat's MLP is ``fc1, fc2``, where OLMo's, whose norms are bare too, has a gate."""
    norms = (part.read for part in PRE_NORM)
    bare = not any(_parameters(getattr(layer, name)) for name in norms)
    children = {name for name, child in layer.named_children() if _parameters(child)}
    mlp = {name for name, child in layer.mlp.named_children() if _parameters(child)}
    own = next(layer.parameters(recurse=False), None) is not None
    query_norm = hasattr(layer.self_attn, "q_norm") and hasattr(layer.self_attn, "k_norm")
    return bare and children == {"self_attn", "mlp"} and mlp == {"fc1", "fc2"} and query_norm and not own


def _parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
