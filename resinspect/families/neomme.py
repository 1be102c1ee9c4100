"""NeoMME: attention reads a mix of the residual and the embedding; every write has the same factor."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from resinspect.anatomy import Site
from resinspect.families.layout import Layout
from resinspect.families.stack import PRE_NORM, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.families.weighted import Weighted
from resinspect.program import Carrier, Native

State = tuple[Tensor, Tensor]


class InitialMix(Weighted):
    """Attention reads ``l0 h + l1 x0`` with the embedding x0; the carry itself stays ``h' = h + c v``.

    Args:
        mix: Per layer, ``(l0, l1)``.
        add: As in ``Weighted``.
    """

    def __init__(self, mix: Sequence[Tensor], add: Mapping[int, Tensor]) -> None:
        super().__init__(add=add)
        self.mix = tuple(weights.detach() for weights in mix)

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The carry and the embedding."""
        return embedding, embedding

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """Attention reads the mix, the rest the carry."""
        carry, _ = state
        if site.kind != "attn":
            return (carry,), state
        return (carrier.combine(self.mix[site.layer].to(carry.device, carry.dtype), state),), state

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """Into the carry only."""
        carry, embedding = state
        return super().write(carrier, carry, site, native, *values), embedding


def recognise(model: nn.Module) -> Layout | None:
    """The layout of pre-norm layers with two ``lambdas`` and a ``residual_multiplier``."""
    stack = find_stack(model, (*parts_of(PRE_NORM), "lambdas", "residual_multiplier"), ("embedding_norm", "final_norm"))
    if stack is None or not all(layer.lambdas.shape == (2,) for layer in stack.layers):
        return None
    anatomy = sequence_of(stack, PRE_NORM)
    factors = {
        site.index: torch.tensor(stack.layers[site.layer].residual_multiplier, dtype=torch.float64)
        for site in anatomy.sites[:-1]
    }
    return Layout(
        family="neomme",
        scheme="initial_mix",
        anatomy=anatomy,
        taps=tuple(sequence_taps(stack, anatomy, PRE_NORM, embedding="embedding_norm", final="final_norm")),
        connection=InitialMix([layer.lambdas for layer in stack.layers], factors),
        write_definition="output of the attention and MLP modules, before the residual multiplier",
        source_definition="source 0 is the normed embedding of tokens and patches",
        routing=tuple(stack.inside(i, "lambdas") for i in range(len(stack.layers))),
    )
