"""Block Attention Residuals (arXiv 2603.15031, section 3.2): depth attention over block sums."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.models.connections.attnres import depth_scores
from resinspect.program import Carrier, Connection, Native

Blocks = tuple[tuple[Tensor, ...], Tensor | None]


class BlockAttnRes(Connection):
    """As ``attnres``, but over the embedding, the sums of completed blocks, and the partial sum of the current block.

    Rows of native weights sum to 1; rows of W do not, since every write of a block gets the block's whole weight.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        block_size: Sublayers in a block; the last may be shorter.
        eps: Added to the mean square in the key norm.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha",) for kind in ("attn", "mlp", "final")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("slot",)}

    def __init__(self, *, num_sites: int, hidden_size: int, block_size: int = 4, eps: float = 1e-6) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_sites - 1, hidden_size))
        self.block_size, self.eps = block_size, eps

    def reset_parameters(self) -> None:
        """Zero queries: a uniform average over block sums."""
        init.zeros_(self.query)

    def route_read(self, state: Blocks, site: Site) -> Native:
        """``alpha (batch, token, block sums so far)``: the softmax over depth, the partial sum last."""
        slots = self._slots(state)
        if site.index == 0:
            return {"alpha": slots[0].new_ones(*slots[0].shape[:-1], 1)}
        return {"alpha": depth_scores(slots, self.query[site.index - 1], self.eps).softmax(-1)}

    def start(self, carrier: Carrier, embedding: Tensor) -> Blocks:
        """The embedding is a block of its own; no partial sum yet."""
        return (embedding,), None

    def read(self, carrier: Carrier, state: Blocks, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Blocks]:
        """Block sums and partial sum, averaged with ``alpha``."""
        return (carrier.combine(native["alpha"], self._slots(state)),), state

    def write(self, carrier: Carrier, state: Blocks, site: Site, native: Native, value: Tensor) -> Blocks:
        """Add to the partial sum; the last sublayer of a block completes it."""
        blocks, partial = state
        partial = value if partial is None else partial + value
        return ((*blocks, partial), None) if (site.index + 1) % self.block_size == 0 else (blocks, partial)

    @staticmethod
    def _slots(state: Blocks) -> tuple[Tensor, ...]:
        blocks, partial = state
        return blocks if partial is None else (*blocks, partial)
