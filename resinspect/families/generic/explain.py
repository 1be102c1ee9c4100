"""Whether one recorded vector is a weighted sum of others, with one number for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DEPENDENT = 4.0
"""A vector that others explain up to so many roundings says nothing new."""
SIGNIFICANT = 10.0
"""A weight counts when it is so many standard errors away from 0."""
OWN = 1e-14
"""Rounding of the explanation itself, which runs in float64."""
SMALLEST = 1e-7
"""A term smaller than this share of the sum is rounding, whatever its error says."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a sum.

    Attributes:
        value: Its value.
        error: The standard error with which that is known.
        parameter: Name of the model's parameter that it is, if it is one.
    """

    value: float
    error: float = 0.0
    parameter: str = ""


ONE = Weight(1.0)


def explain(target: Tensor, columns: Sequence[Tensor]) -> list[Weight | None] | None:
    """The weights with which columns add up to a target, None for those that take no part.

    A column that earlier ones explain takes no part, so list first what should be preferred. Every element counts
    relative to its own size: large channels do not hide small ones.

    Args:
        target: ``(row, token, channel)``.
        columns: Of the same shape.

    Returns:
        One weight per column, or None if no such sum reaches the target within its rounding.
    """
    if not columns or not target.isfinite().all():
        return None
    eps = max(OWN, *(torch.finfo(value.dtype).eps for value in (target, *columns)))
    y = target.double().flatten()
    a = torch.stack([column.double().flatten() for column in columns], dim=1)
    size = y.abs() + a[:, 0].abs()
    size = size + 0.01 * size.square().mean().sqrt()
    yw, aw = y / size, a / size[:, None]
    chosen = _independent(aw, eps)
    while chosen:
        part = aw[:, chosen]
        weights = torch.linalg.lstsq(part, yw[:, None]).solution[:, 0]
        rest = (yw - part @ weights).square().mean().sqrt().clamp_min(0.3 * eps)
        errors = rest * torch.linalg.inv(part.mT @ part).diagonal().clamp_min(0).sqrt()
        share = weights.abs() * part.norm(dim=0) / yw.norm()
        surety = (weights.abs() / errors).masked_fill(share < SMALLEST, 0.0)
        if surety.min() >= SIGNIFICANT:
            break
        chosen.pop(int(surety.argmin()))
    if not chosen or not _reaches(y, a[:, chosen], weights, eps):
        return None
    found = {c: Weight(float(w), float(e)) for c, w, e in zip(chosen, weights, errors, strict=True)}
    return [found.get(c) for c in range(len(columns))]


def _independent(columns: Tensor, eps: float) -> list[int]:
    """Indices of columns that are not sums of those before them (Gram-Schmidt, twice for its own rounding)."""
    chosen, basis = [], columns.new_empty(columns.shape[0], 0)
    for i, column in enumerate(columns.unbind(1)):
        rest = column
        for _ in range(2):
            rest = rest - basis @ (basis.mT @ rest)
        if column.isfinite().all() and rest.norm() > DEPENDENT * eps * column.norm():
            chosen.append(i)
            basis = torch.cat([basis, (rest / rest.norm())[:, None]], dim=1)
    return chosen


def _reaches(y: Tensor, a: Tensor, weights: Tensor, eps: float) -> bool:
    """Whether what is left over is rounding of the terms, on average over all elements."""
    terms = a.abs() @ weights.abs()
    left = torch.where(terms > 0, (y - a @ weights).abs() / terms, torch.where(y == 0, 0.0, torch.inf))
    return bool(left.square().mean().sqrt() <= eps)
