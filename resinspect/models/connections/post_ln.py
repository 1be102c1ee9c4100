"""Post-LN (Vaswani et al. 2017): the norm is on the carry, so W holds given its statistics."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.program import TERM, Carrier, Connection, Native


class PostLN(Connection):
    """``h' = LayerNorm(h + v)``: sublayers read the normed carry directly, and the readout needs no norm of its own.

    Exact given the observed statistics ("conditional"): every norm's scale depends on all sources together. The biases
    of the norms are sources of their own.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        eps: Added to the variance.
    """

    carrier = TERM
    pre_norm = False
    extra_sources: ClassVar[tuple[str, ...]] = ("bias",)
    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("rstd", "gain") for kind in ("attn", "mlp")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"rstd": (), "gain": ("hidden",)}

    def __init__(self, *, num_sites: int, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_sites - 1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_sites - 1, hidden_size))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Unit gains, zero biases."""
        init.ones_(self.gain)
        init.zeros_(self.bias)

    def extras(self, state: Tensor, site: Site) -> tuple[Tensor, ...]:
        """The bias of the site's norm, ``(batch, token, d)``."""
        return (self.bias[site.index].expand_as(state),)

    def route_write(self, state: Tensor, site: Site, value: Tensor) -> Native:
        """``rstd (batch, token)`` of the sum and the norm's ``gain (batch, token, d)``."""
        variance = (state + value).var(-1, unbiased=False)
        return {"rstd": torch.rsqrt(variance + self.eps), "gain": self.gain[site.index].expand_as(state)}

    def write(
        self, carrier: Carrier, state: Tensor, site: Site, native: Native, value: Tensor, *extras: Tensor
    ) -> Tensor:
        """Norm the sum, then add the bias."""
        (bias,) = extras
        return carrier.normalise(state + value, native["rstd"], native["gain"], centre=True) + bias
