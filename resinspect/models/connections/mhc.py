"""Manifold-constrained Hyper-Connections (arXiv 2512.24880): streams mixed by Sinkhorn-Knopp."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.models.connections.hyper_connections import Streams
from resinspect.program import Native


class MHC(Streams):
    """Each site reads ``sum_n pre_n X_n`` and the streams become ``X' = mix X + post v``; the readout sums the streams.

    All weights come from one RMS norm over all streams together: ``pre = sigmoid``, ``post = 2 sigmoid``, ``mix`` =
    Sinkhorn-Knopp with columns first and rows last, so rows sum to 1 and columns nearly. The paper does not state the
    biases; here the streams start as the plain residual with nearly unmixed streams (``pre = 1/n``, ``post = 1``).

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        streams: Number of streams n.
        iterations: Sinkhorn-Knopp rounds.
        diagonal: Logit of each stream's own weight in ``mix`` at the start; the others start at 0.
        eps: Added to the mean square in the joint norm.
    """

    def __init__(
        self,
        *,
        num_sites: int,
        hidden_size: int,
        streams: int = 4,
        iterations: int = 20,
        diagonal: float = 4.0,
        eps: float = 1e-20,
    ) -> None:
        super().__init__()
        self.streams, self.iterations, self.diagonal, self.eps = streams, iterations, diagonal, eps
        sublayers, outputs = num_sites - 1, streams * (streams + 2)
        self.weight = nn.Parameter(torch.empty(sublayers, streams * hidden_size, outputs))
        self.bias = nn.Parameter(torch.empty(sublayers, outputs))
        self.scale = nn.Parameter(torch.empty(sublayers, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Silent dynamic part; reads average the streams, writes go to all, mixing is nearly the identity."""
        n = self.streams
        pre = torch.full((n,), -math.log(n - 1) if n > 1 else 20.0)
        bias = torch.cat([pre, torch.zeros(n), (self.diagonal * torch.eye(n)).flatten()])
        init.zeros_(self.weight)
        init.copy_(self.bias, bias.expand_as(self.bias))
        init.constant_(self.scale, 0.01)

    def route_read(self, state: Tensor, site: Site) -> Native:
        """``pre`` and ``post`` ``(batch, token, n)``, ``mix (batch, token, n, n)``; computed in float32 or better."""
        if site.kind == "final":
            return {}
        i, n = site.index, self.streams
        flat = state.flatten(-2)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        normed = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        scale = self.scale[i].to(flat.dtype).repeat_interleave(torch.tensor([n, n, n * n], device=flat.device))
        logits = scale * (normed @ self.weight[i].to(flat.dtype)) + self.bias[i].to(flat.dtype)
        pre, post, mix = logits.split([n, n, n * n], dim=-1)
        return {
            "pre": pre.sigmoid().to(state.dtype),
            "post": 2 * post.sigmoid().to(state.dtype),
            "mix": sinkhorn(mix.unflatten(-1, (n, n)), self.iterations).to(state.dtype),
        }


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Doubly stochastic matrices ``(..., n, n)`` from logits: columns normed first, rows last, in log space."""
    # Tokens last while it iterates: sums over a dimension of n are slow when that is the one in memory order.
    logits = logits.movedim((-2, -1), (0, 1)).contiguous()
    for _ in range(iterations):
        logits = logits - logits.logsumexp(0, keepdim=True)
        logits = logits - logits.logsumexp(1, keepdim=True)
    return logits.movedim((0, 1), (-2, -1)).exp()
