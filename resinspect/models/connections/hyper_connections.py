"""Hyper-Connections, static and dynamic (arXiv 2409.19606): n parallel residual streams."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.program import Carrier, Connection, Native


class Streams(Connection):
    """The linear part of n parallel streams: read ``sum_n pre_n X_n``, then ``X' = mix X + post v``, at last their sum.

    Attributes:
        streams: Number of streams n.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("pre", "post", "mix") for kind in ("attn", "mlp")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {
        "pre": ("stream",),
        "post": ("stream",),
        "mix": ("stream", "stream2"),
    }

    streams: int

    def start(self, carrier: Carrier, embedding: Tensor) -> Tensor:
        """Every stream starts as the embedding: ``(..., n, *slot)``."""
        return carrier.expand(embedding, self.streams)

    def read(self, carrier: Carrier, state: Tensor, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Tensor]:
        """A weighted sum of streams; at the final readout their plain sum."""
        if site.kind == "final":
            return (carrier.collapse(state),), state
        return (carrier.mix(native["pre"].unsqueeze(-2), state).squeeze(-carrier.features - 1),), state

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, value: Tensor) -> Tensor:
        """Mix the streams, then add the write to each."""
        return carrier.mix(native["mix"], state) + carrier.outer(native["post"], value)


class HyperConnections(Streams):
    """Each site reads ``sum_n pre_n X_n`` and the streams become ``X' = mix X + post v``; the readout sums the streams.

    In the paper's symbols ``pre = A_m``, ``mix = A_r^T`` and ``post = B``. With ``dynamic`` each stream adds
    ``scale * tanh(rms(X_n) gain . w)`` to its own static weights. At initialisation site k reads stream ``k mod n``,
    streams are not mixed and every write goes to all of them: the plain residual, with a final row of n.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        streams: Number of streams n.
        dynamic: Whether weights depend on the token.
        eps: Added to the mean square in the norm of each stream.
    """

    def __init__(
        self, *, num_sites: int, hidden_size: int, streams: int = 4, dynamic: bool = True, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.streams, self.dynamic, self.eps = streams, dynamic, eps
        sublayers = num_sites - 1
        self.pre = nn.Parameter(torch.empty(sublayers, streams))
        self.post = nn.Parameter(torch.empty(sublayers, streams))
        self.mix = nn.Parameter(torch.empty(sublayers, streams, streams))
        if dynamic:
            self.gain = nn.Parameter(torch.empty(sublayers, hidden_size))
            self.weight = nn.Parameter(torch.empty(sublayers, hidden_size, streams + 2))
            self.scale_alpha = nn.Parameter(torch.empty(sublayers))
            self.scale_beta = nn.Parameter(torch.empty(sublayers))
        self.reset_parameters()

    @property
    def output_init_scale(self) -> float:
        """Output projections start larger by the square root of n, as in the paper (section 4, initialisation)."""
        return self.streams**0.5

    def reset_parameters(self) -> None:
        """The plain residual: one-hot reads, identity mixing, unit writes, silent dynamic part."""
        n = self.streams
        init.copy_(self.pre, torch.eye(n)[torch.arange(self.pre.shape[0]) % n])
        init.ones_(self.post)
        init.copy_(self.mix, torch.eye(n).expand_as(self.mix))
        if self.dynamic:
            init.ones_(self.gain)
            init.zeros_(self.weight)
            init.constant_(self.scale_alpha, 0.01)
            init.constant_(self.scale_beta, 0.01)

    def route_read(self, state: Tensor, site: Site) -> Native:
        """``pre`` and ``post`` ``(batch, token, n)``, ``mix (batch, token, n, n)`` in the convention ``X' = mix X``."""
        if site.kind == "final":
            return {}
        i, (batch, tokens, n) = site.index, state.shape[:3]
        if not self.dynamic:
            return {
                "pre": self.pre[i].expand(batch, tokens, n),
                "post": self.post[i].expand(batch, tokens, n),
                "mix": self.mix[i].mT.expand(batch, tokens, n, n),
            }
        normed = nn.functional.rms_norm(state, state.shape[-1:], self.gain[i], self.eps)
        raw = torch.tanh(normed @ self.weight[i])
        return {
            "pre": self.scale_alpha[i] * raw[..., 0] + self.pre[i],
            "post": self.scale_beta[i] * raw[..., 1] + self.post[i],
            "mix": (self.scale_alpha[i] * raw[..., 2:] + self.mix[i]).mT,
        }
