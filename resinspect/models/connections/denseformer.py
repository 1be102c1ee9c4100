"""DenseFormer (arXiv 2402.02622): static weighted averages over the outputs of whole layers."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.program import Carrier, Connection, Native

Outputs = tuple[tuple[Tensor, ...], Tensor]


class DenseFormer(Connection):
    """After layer i its output ``X_i`` is replaced by ``Y_i = sum_j alpha_ij X_j`` over earlier outputs, ``X_0 = emb``.

    Weights are free scalars: no softmax, any sign, the same for every token. They start at ``alpha_ii = 1`` and 0
    elsewhere, the plain residual. A write appears in W along every path through later outputs, so W looks denser than
    ``alpha``.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        dilation: Only outputs ``j`` with ``i - j`` a multiple of this are averaged.
        period: Only every so many layers are followed by an average.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha",) for kind in ("attn", "final")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("slot",)}

    def __init__(self, *, num_sites: int, hidden_size: int, dilation: int = 1, period: int = 1) -> None:
        super().__init__()
        self.dilation, self.period = dilation, period
        layers = (num_sites - 1) // 2
        self.alpha = nn.ParameterDict(
            {str(i): torch.empty(len(self._averaged(i))) for i in range(1, layers + 1) if i % period == 0}
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All weight on the newest output."""
        for alpha in self.alpha.values():
            init.copy_(alpha, torch.eye(len(alpha))[-1])

    def route_read(self, state: Outputs, site: Site) -> Native:
        """``alpha (batch, token, outputs averaged)``, oldest first; nothing where no average is due."""
        after = self._layers_before(state, site)
        if str(after) not in self.alpha:
            return {}
        alpha = self.alpha[str(after)]
        return {"alpha": alpha.expand(*state[1].shape[:2], len(alpha))}

    def start(self, carrier: Carrier, embedding: Tensor) -> Outputs:
        """Outputs of the layers so far, the embedding first, and the running residual."""
        return (embedding,), embedding

    def read(self, carrier: Carrier, state: Outputs, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Outputs]:
        """At the start of a layer the residual is the average over outputs; inside a layer it is the plain sum."""
        outputs, residual = state
        if "alpha" in native:
            averaged = [outputs[j] for j in self._averaged(self._layers_before(state, site))]
            residual = carrier.combine(native["alpha"], averaged)
        return (residual,), (outputs, residual)

    def write(self, carrier: Carrier, state: Outputs, site: Site, native: Native, value: Tensor) -> Outputs:
        """Add to the residual; the last sublayer of a layer completes its output."""
        outputs, residual = state[0], state[1] + value
        return (*outputs, residual) if site.kind == "mlp" else outputs, residual

    def _averaged(self, layer: int) -> range:
        return range(layer % self.dilation, layer + 1, self.dilation)

    @staticmethod
    def _layers_before(state: Outputs, site: Site) -> int:
        return 0 if site.kind == "mlp" else len(state[0]) - 1
