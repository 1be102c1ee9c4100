"""Deep Delta Learning with one value channel (arXiv 2601.00417): erase along a direction, then write."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.errors import OptionError
from resinspect.program import COEFFICIENT, TERM, Carrier, Connection, Native

VIEWS = ("raw", "operator")


class DDL(Connection):
    """``x' = x + beta k (value - k . x)`` with ``k = F / |F|`` the direction of the sublayer's output F.

    Two exact views of the same forward, which differ in what happens to old sources. ``raw``: x' is x plus a scalar
    times F, so W is one scalar per write and nothing is ever erased. ``operator``: x' is ``(I - beta k k^T) x`` plus
    ``beta value k``, so old sources lose their part along k; W is then the best scalar of each term.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        view: ``"raw"`` or ``"operator"``.
        beta: Strength at the start, between 0 and 2: 0 keeps x, 1 replaces its part along k, 2 reflects it.
        eps: Added to the mean square in the norm, and to the norm of F.
    """

    def __init__(
        self, *, num_sites: int, hidden_size: int, view: str = "raw", beta: float = 1.0, eps: float = 1e-6
    ) -> None:
        super().__init__()
        if view not in VIEWS or not 0 < beta < 2:
            raise OptionError(f"ddl has view {view!r} and beta {beta}; allowed are {VIEWS} and 0 < beta < 2.")
        self.carrier = COEFFICIENT if view == "raw" else TERM
        names = ("beta", "pull") if view == "raw" else ("beta", "key", "write_gain")
        self.natives = dict.fromkeys(("attn", "mlp"), names)
        self.native_dims = {name: ("hidden",) if name == "key" else () for name in names}
        self.start_beta, self.eps = beta, eps
        sublayers = num_sites - 1
        self.beta = nn.Parameter(torch.empty(sublayers, hidden_size))
        self.beta_bias = nn.Parameter(torch.empty(sublayers))
        self.value = nn.Parameter(torch.empty(sublayers, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Strength ``beta`` and value 2 for every token; both learn to depend on it."""
        init.zeros_(self.beta)
        init.zeros_(self.value)
        init.constant_(self.beta_bias, math.log(self.start_beta / (2 - self.start_beta)))

    def route_write(self, state: Tensor, site: Site, value: Tensor) -> Native:
        """``raw``: beta, and what it multiplies to the gain of F; ``operator``: beta, key and the gain of F.

        Each ``(batch, token)``, the key ``(batch, token, d)``.
        """
        context = nn.functional.rms_norm(state, state.shape[-1:], eps=self.eps)
        norm = torch.linalg.vector_norm(value, dim=-1) + self.eps
        key = value / norm[..., None]
        beta = 2 * torch.sigmoid(context @ self.beta[site.index] + self.beta_bias[site.index])
        target = 4 * torch.sigmoid(context @ self.value[site.index])
        if self.carrier == COEFFICIENT:
            return {"beta": beta, "pull": (target - (key * state).sum(-1)) / norm}
        return {"beta": beta, "key": key, "write_gain": beta * target / norm}

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, value: Tensor) -> Tensor:
        """Erase and write, in the chosen view."""
        if self.carrier == COEFFICIENT:
            return state + carrier.scale(native["beta"] * native["pull"], value)
        return carrier.rank_one(state, native["beta"], native["key"]) + carrier.scale(native["write_gain"], value)
