"""Full Attention Residuals (arXiv 2603.15031, section 3; systems.md 3.1): softmax attention over depth."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.program import Carrier, Connection, Native


class AttnRes(Connection):
    """``h_r = sum_s softmax_s(w_r . rms(v_s)) v_s``: one learned query per reader, gain-free key norm, raw values.

    The first reader has a single source and needs no query. Queries start at zero, so every reader starts as the
    mean of its sources. The final readout is routed by its own query.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        eps: Added to the mean square in the key norm.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha",) for kind in ("attn", "mlp", "final")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("slot",)}

    def __init__(self, *, num_sites: int, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_sites - 1, hidden_size))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Zero queries: a uniform average over sources, as the paper requires."""
        init.zeros_(self.query)

    def route_read(self, state: tuple[Tensor, ...], site: Site) -> Native:
        """``alpha (batch, token, sources so far)``: the softmax over depth."""
        if site.index == 0:
            return {"alpha": state[0].new_ones(*state[0].shape[:-1], 1)}
        query = self.query[site.index - 1]
        return {"alpha": torch.stack([self._score(value, query) for value in state], dim=-1).softmax(-1)}

    def start(self, carrier: Carrier, embedding: Tensor) -> tuple[Tensor, ...]:
        """The bank holds every write so far."""
        return (embedding,)

    def read(
        self, carrier: Carrier, state: tuple[Tensor, ...], site: Site, native: Native
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The bank, averaged with ``alpha``."""
        return (carrier.combine(native["alpha"], state),), state

    def write(
        self, carrier: Carrier, state: tuple[Tensor, ...], site: Site, native: Native, value: Tensor
    ) -> tuple[Tensor, ...]:
        """The bank grows by one write."""
        return (*state, value)

    def _score(self, value: Tensor, query: Tensor) -> Tensor:
        mean_square = torch.linalg.vector_norm(value, dim=-1).square() / value.shape[-1]
        return (value @ query) * torch.rsqrt(mean_square + self.eps)
