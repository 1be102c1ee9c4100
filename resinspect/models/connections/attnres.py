"""Full Attention Residuals (arXiv 2603.15031, section 3): softmax attention over depth."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from resinspect.anatomy import Site
from resinspect.errors import OptionError
from resinspect.program import Carrier, Connection, Native

QUERIES = ("fixed", "dynamic")
KEYS = ("dynamic", "static")


class AttnRes(Connection):
    """``h_r = sum_s softmax_s(score) v_s`` over the embedding and all earlier writes; raw values, gain-free key norm.

    The score is the paper's ``w_r . rms(v_s)`` with a fixed query and a dynamic key, or another cell of the 2 x 2 of
    what may depend on the token:

    | | key ``dynamic``: ``rms(v_s)`` | key ``static``: learned per reader and source |
    |---|---|---|
    | query ``fixed`` | ``w_r . rms(v_s)`` | ``a_rs`` |
    | query ``dynamic`` | ``W_r rms(x) . rms(v_s) / sqrt(d)`` | ``W_r rms(x) . kappa_rs / sqrt(rank) + a_rs`` |

    ``x`` is the newest write. The first reader has a single source and needs no query. Every cell starts as the mean
    of its sources: ``w``, ``W`` and ``a`` at zero, static keys of a dynamic query random so that gradients flow. The
    final readout is routed by its own query.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        query: ``"fixed"`` or ``"dynamic"``.
        key: ``"dynamic"`` or ``"static"``.
        rank: Width of a dynamic query over static keys.
        eps: Added to the mean square in the norms.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha",) for kind in ("attn", "mlp", "final")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("slot",)}

    def __init__(
        self,
        *,
        num_sites: int,
        hidden_size: int,
        query: str = "fixed",
        key: str = "dynamic",
        rank: int = 16,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if query not in QUERIES or key not in KEYS:
            raise OptionError(f"attnres has query {query!r} and key {key!r}; allowed are {QUERIES} and {KEYS}.")
        self.dynamic_query, self.static_key, self.eps = query == "dynamic", key == "static", eps
        readers = num_sites - 1
        if self.dynamic_query:
            width = rank if self.static_key else hidden_size
            self.project = nn.Parameter(torch.empty(readers, hidden_size, width))
        elif not self.static_key:
            self.query = nn.Parameter(torch.empty(readers, hidden_size))
        if self.static_key:
            self.score = nn.ParameterList(torch.empty(i + 2) for i in range(readers))
            if self.dynamic_query:
                self.key = nn.ParameterList(torch.empty(i + 2, rank) for i in range(readers))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A uniform average over sources."""
        for name, parameter in self.named_parameters():
            if name.startswith("key"):
                init.normal_(parameter)
            else:
                init.zeros_(parameter)

    def route_read(self, state: tuple[Tensor, ...], site: Site) -> Native:
        """``alpha (batch, token, sources so far)``: the softmax over depth."""
        if site.index == 0:
            return {"alpha": state[0].new_ones(*state[0].shape[:-1], 1)}
        return {"alpha": self._scores(state, site.index - 1).softmax(-1)}

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

    def _scores(self, bank: Sequence[Tensor], reader: int) -> Tensor:
        newest = bank[-1]
        if self.dynamic_query:
            query = nn.functional.rms_norm(newest, newest.shape[-1:], eps=self.eps) @ self.project[reader]
            query = query * query.shape[-1] ** -0.5
            if not self.static_key:
                return depth_scores(bank, query, self.eps)
            return query @ self.key[reader].mT + self.score[reader]
        if self.static_key:
            return self.score[reader].expand(*newest.shape[:-1], len(bank))
        return depth_scores(bank, self.query[reader], self.eps)


def depth_scores(bank: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """``query . rms(v)`` for every ``v (batch, token, d)`` of the bank: ``(batch, token, len(bank))``.

    The query is ``(d)`` or ``(batch, token, d)``. The norm is applied to the score, so no normed copy is made.
    """
    scores = []
    for value in bank:
        mean_square = torch.linalg.vector_norm(value, dim=-1).square() / value.shape[-1]
        score = value @ query if query.ndim == 1 else (value * query).sum(-1)
        scores.append(score * torch.rsqrt(mean_square + eps))
    return torch.stack(scores, dim=-1)
