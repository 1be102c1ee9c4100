"""DeepCrossAttention (arXiv 2502.06785): gated sums over the outputs of whole layers, per channel."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.errors import OptionError
from resinspect.program import COEFFICIENT, TERM, Carrier, Connection, Native

GRNS = ("v1", "v2", "v3")
Stack = tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]


class DCA(Connection):
    """Attention reads generalised sums ``g = sum_n (b_n + relu(w . s_n)) s_n`` over earlier layer outputs ``s_n``.

    The stack holds the embedding and, for each layer, the sum of its two writes; the layer's input is not added to its
    output. The MLP reads attention's (query) input plus attention's write. With ``views`` of 3, attention reads three
    separate sums for queries, keys and values. A last sum feeds the readout. All start as the plain residual: ``b = 1``
    and ``w = 0``.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        grn: ``"v1"``: one scalar ``b`` per source; ``"v2"``: one per channel; ``"v3"``: as v2, plus the part that
            depends on the token.
        views: 1, or 3 for separate queries, keys and values.
        window: Keep the embedding, the last ``window`` layer outputs, and the sum of those in between; 0 keeps all.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("gate",) for kind in ("attn", "final")}

    def __init__(self, *, num_sites: int, hidden_size: int, grn: str = "v3", views: int = 3, window: int = 0) -> None:
        super().__init__()
        if grn not in GRNS or views not in (1, 3):
            raise OptionError(f"dca has grn {grn!r} and views {views!r}; allowed are {', '.join(GRNS)} and 1 or 3.")
        self.grn, self.window = grn, window
        self.views = {"attn": ("q", "k", "v")} if views == 3 else {}
        self.carrier = COEFFICIENT if grn == "v1" else TERM
        self.native_dims = {"gate": ("view", "slot") if grn == "v1" else ("view", "slot", "hidden")}
        layers, channels = (num_sites - 1) // 2, () if grn == "v1" else (hidden_size,)
        counts = [self._slots(layer) for layer in range(layers + 1)]
        readers = [views] * layers + [1]
        self.bias = nn.ParameterList(torch.empty(r, n, *channels) for r, n in zip(readers, counts, strict=True))
        if grn == "v3":
            self.weight = nn.ParameterList(torch.empty(r, hidden_size) for r in readers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The plain residual."""
        for bias in self.bias:
            init.ones_(bias)
        for weight in self.weight if self.grn == "v3" else ():
            init.zeros_(weight)

    def route_read(self, state: Stack, site: Site) -> Native:
        """``gate (batch, token, view, slot)``, with a last dimension of channels for v2 and v3."""
        if site.kind == "mlp":
            return {}
        slots = self._windowed(state[0])
        layer = site.layer if site.kind == "attn" else len(self.bias) - 1
        gate = self.bias[layer].expand(*slots[0].shape[:2], *self.bias[layer].shape)
        if self.grn == "v3":
            dynamic = torch.stack([slot @ self.weight[layer].mT for slot in slots], dim=-1)
            # ReLU, but with slope 1 at 0: with torch's slope 0 there, weights that start at zero would never learn.
            gate = gate + dynamic.clamp_min(0)[..., None]
        return {"gate": gate}

    def start(self, carrier: Carrier, embedding: Tensor) -> Stack:
        """The stack of layer outputs, the current layer's input, and its attention write."""
        return (embedding,), None, None

    def read(self, carrier: Carrier, state: Stack, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Stack]:
        """Attention and readout read gated sums; the MLP reads attention's input plus its write."""
        stack, entered, attended = state
        if site.kind == "mlp":
            return (entered + attended,), state
        # Unbound, not indexed: the gradient of an index is a copy of the whole gate for every slot.
        gates = native["gate"].unbind(-2 if self.grn == "v1" else -3)
        inputs = tuple(self._gated(carrier, stack, gate) for gate in gates)
        return inputs, (stack, inputs[0], None)

    def write(self, carrier: Carrier, state: Stack, site: Site, native: Native, value: Tensor) -> Stack:
        """The two writes of a layer enter the stack together."""
        stack, entered, attended = state
        if site.kind == "attn":
            return stack, entered, value
        return (*stack, attended + value), None, None

    def _gated(self, carrier: Carrier, stack: tuple[Tensor, ...], gate: Tensor) -> Tensor:
        slots = self._windowed(stack)
        if self.grn == "v1":
            return carrier.combine(gate, slots)
        return sum(carrier.channels(weight, slot) for weight, slot in zip(gate.unbind(-2), slots, strict=True))

    def _windowed(self, stack: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        middle = len(stack) - 1 - self.window
        if not self.window or middle < 1:
            return stack
        return stack[0], sum(stack[1 : middle + 1]), *stack[middle + 1 :]

    def _slots(self, outputs: int) -> int:
        """Slots of a stack with the embedding and so many layer outputs."""
        return outputs + 1 if not self.window else min(outputs + 1, self.window + 2)
