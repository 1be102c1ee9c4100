"""Doge: a static weight per channel on the carry of every addition.

The experts of its MoE variant mix the router's logits of all tokens in a batch (transformers keeps it so on purpose);
its writes, and all that a trace says of them, therefore depend on what else is in the batch; the weights do not.
"""

from torch import Tensor, nn

from resinspect.families.layout import Layout
from resinspect.families.stack import PRE_NORM, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.families.weighted import Weighted

KEEPS = {"attn": "input_residual", "mlp": "post_attention_residual"}


def recognise(model: nn.Module) -> Layout | None:
    """The layout of pre-norm layers with a vector of parameters for each addition: ``h' = p h + v``."""
    stack = find_stack(model, (*parts_of(PRE_NORM), *KEEPS.values()))
    if stack is None or not all(_is_vector(getattr(layer, name)) for layer in stack.layers for name in KEEPS.values()):
        return None
    anatomy = sequence_of(stack, PRE_NORM)
    sites = anatomy.sites[:-1]
    return Layout(
        family="doge",
        scheme="weighted_carry",
        anatomy=anatomy,
        taps=tuple(sequence_taps(stack, anatomy, PRE_NORM)),
        connection=Weighted(keep={site.index: getattr(stack.layers[site.layer], KEEPS[site.kind]) for site in sites}),
        write_definition="output of the attention and MLP modules",
        source_definition="source 0 is what enters the first layer",
        routing=tuple(stack.inside(site.layer, KEEPS[site.kind]) for site in sites),
    )


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 1
