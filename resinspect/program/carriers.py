"""Carriers: what a slot of the residual state holds while a connection's linear program runs over it.

The same program runs on three carriers. ``VECTOR`` slots are hidden vectors ``(..., d)``: the forward pass.
``COEFFICIENT`` slots are weights over sources ``(..., S)``: they end as rows of W. ``TERM`` slots are one vector per
source ``(..., S, d)``: for programs whose weights differ per channel or whose operators do not commute with them.
The leading dimensions may be missing when nothing depends on the token; everything broadcasts.

For error analysis a program also runs on **paths**: every weight and slot by its absolute value, every subtraction as a
sum. What comes out is the sum of the absolute paths to each place, which is what rounding is relative to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class CarrierError(TypeError):
    """A linear verb that one scalar per source cannot express; run the program on ``TERM`` instead."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """The linear verbs on one kind of slot.

    Attributes:
        name: ``"vector"``, ``"coefficient"`` or ``"term"``.
        features: Number of trailing dimensions that belong to the slot.
        paths: Whether it sums absolute paths; slots must then be non-negative.
    """

    name: str
    features: int
    paths: bool = False

    def scale(self, weight: Tensor, slot: Tensor) -> Tensor:
        """``weight * slot`` with one scalar ``(...)`` per token."""
        return self._scalar(weight) * slot

    def combine(self, weights: Tensor, slots: Sequence[Tensor]) -> Tensor:
        """Weighted sum of ``n`` slots with weights ``(..., n)``, without stacking them."""
        first, *others = weights.unbind(-1)
        total = self.scale(first, slots[0])
        for weight, slot in zip(others[: len(slots) - 1], slots[1:], strict=True):
            total = torch.addcmul(total, self._scalar(weight), slot)
        return total

    def mix(self, matrix: Tensor, streams: Tensor) -> Tensor:
        """``matrix @ streams``: ``(..., m, n)`` on streams ``(..., n, *slot)`` gives ``(..., m, *slot)``."""
        slot = streams.shape[streams.ndim - self.features :]
        matrix = matrix.abs() if self.paths else matrix
        return (matrix @ streams.flatten(-self.features)).unflatten(-1, slot)

    def expand(self, slot: Tensor, streams: int) -> Tensor:
        """``streams`` equal copies of a slot, ``(..., n, *slot)``."""
        return slot.unsqueeze(-self.features - 1).expand(
            *slot.shape[: slot.ndim - self.features], streams, *slot.shape[slot.ndim - self.features :]
        )

    def collapse(self, streams: Tensor) -> Tensor:
        """The sum of all streams."""
        return streams.sum(-self.features - 1)

    def outer(self, weights: Tensor, slot: Tensor) -> Tensor:
        """One scaled copy of a slot per stream: weights ``(..., n)`` give ``(..., n, *slot)``."""
        return self._scalar(weights) * slot.unsqueeze(-self.features - 1)

    def channels(self, weight: Tensor, slot: Tensor) -> Tensor:
        """``weight * slot`` with one weight per channel, ``(..., d)``."""
        return self._per_channel(weight, "a weight per channel") * slot

    def project(self, matrix: Tensor, slot: Tensor) -> Tensor:
        """``matrix @ slot`` over channels, with one matrix ``(m, d)`` for all tokens."""
        return slot @ self._on_vectors(matrix, "a projection").mT

    def normalise(self, slot: Tensor, rstd: Tensor, gain: Tensor, *, centre: bool = False) -> Tensor:
        """A norm on the carry with frozen statistics: ``(slot - mean) * rstd * gain``; rstd ``(...)``, gain ``(d)``."""
        gain = self._per_channel(gain, "a norm on the carry")
        if centre:
            mean = slot.mean(-1, keepdim=True)
            slot = slot + mean if self.paths else slot - mean
        return slot * self._scalar(rstd) * gain

    def rank_one(self, slot: Tensor, strength: Tensor, key: Tensor) -> Tensor:
        """``(I - strength key key^T) slot`` with strength ``(...)`` and key ``(..., d)``."""
        key = self._per_channel(key, "a rank-one operator")
        erased = self._scalar(strength) * (slot * key).sum(-1, keepdim=True) * key
        return slot + erased if self.paths else slot - erased

    def _scalar(self, weight: Tensor) -> Tensor:
        weight = weight.abs() if self.paths else weight
        return weight[(..., *(None,) * self.features)]

    def _per_channel(self, weight: Tensor, what: str) -> Tensor:
        weight = self._on_vectors(weight, what)
        return weight if self.features == 1 else weight.unsqueeze(-2)

    def _on_vectors(self, weight: Tensor, what: str) -> Tensor:
        if self.name == "coefficient":
            raise CarrierError(f"{what} cannot run on coefficients; run the program on the term carrier.")
        return weight.abs() if self.paths else weight


VECTOR = Carrier("vector", 1)
COEFFICIENT = Carrier("coefficient", 1)
TERM = Carrier("term", 2)
VECTOR_PATHS = Carrier("vector", 1, paths=True)
COEFFICIENT_PATHS = Carrier("coefficient", 1, paths=True)
