"""W from reader inputs and writes alone: least squares per token, all readers from one Cholesky factor.

Sources stand in execution order, so each reader's sources are a prefix, and the leading block of the Cholesky factor
of the Gram matrix is the factor of the leading block. With ``G = L L^T`` and ``C = V H^T``, the solution for a prefix
``p`` is ``L_p^-T (L^-1 C)_p``, which needs one inverse of ``L`` for all readers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IDENTIFIABLE = 1e-4
"""A solved weight counts as identified while its error bound is below this."""


TRADED = 1e-10
"""A source takes part in a dependence if it carries more than this share of the dependent source's length."""


class Solution(NamedTuple):
    """Weights of every reader over its prefix of sources, each ``(token, reader, source)`` in float64.

    Attributes:
        weight: The least-squares weights; NaN beyond a reader's prefix.
        weight_error: Bound of each weight's error; ``inf`` where nothing constrains it, NaN beyond the prefix.
        identifiable: True where ``weight_error`` is below ``IDENTIFIABLE``. Elsewhere a weight is one of many that
            fit equally well: use it to check the fit, never as a result.
    """

    weight: Tensor
    weight_error: Tensor
    identifiable: Tensor


def solve(writes: Tensor, inputs: Tensor, prefix: Sequence[int], *, eps: float) -> Solution:
    """Least-squares W of ``inputs[t, r] = sum_s W[t, r, s] writes[t, s]`` with ``W`` zero beyond each prefix.

    A source whose norm is zero, or that lies in the span of earlier ones up to rounding, does not stop the solve, and
    every weight which that dependence leaves undetermined gets an infinite error bound.

    Args:
        writes: ``(token, source, d)``, in execution order.
        inputs: ``(token, reader, d)``.
        prefix: Per reader, how many leading sources it can read.
        eps: Machine epsilon of the dtype in which the model formed the inputs.

    Returns:
        Weights, error bounds and identifiability, float64.
    """
    writes, inputs = writes.double(), inputs.double()
    gram = writes @ writes.mT
    cross = writes @ inputs.mT
    norm = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    scale = torch.where(norm > 0, norm, 1.0).reciprocal()
    factor, dependent = _cholesky(gram * scale[:, :, None] * scale[:, None, :])
    unit = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(factor, unit, upper=False)
    reach = torch.as_tensor(prefix, device=gram.device)[:, None] > torch.arange(gram.shape[-1], device=gram.device)
    hidden = _hidden(inverse, factor, dependent, reach, width=writes.shape[-1])
    inverse_gram = reach.to(gram.dtype) @ inverse.square()
    weight = ((inverse @ (cross * scale[:, :, None])).mT * reach) @ inverse * scale[:, None, :]
    size = torch.maximum(inputs.norm(dim=-1), (weight.abs() * norm[:, None, :]).sum(-1)).cummax(-1).values
    noise = torch.maximum(eps * size * reach.sum(-1).sqrt(), (inputs - weight @ writes).norm(dim=-1))
    bound = (_error_bound(noise, size, inverse_gram) * scale[:, None, :]).masked_fill(hidden, torch.inf)
    nan = torch.where(reach, 0.0, torch.nan)
    return Solution(weight + nan, bound + nan, (bound < IDENTIFIABLE) & reach)


def _cholesky(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factor of a unit-diagonal Gram matrix ``(token, S, S)``, and which sources depend on earlier ones.

    What is left of a dependent source (or of one that is zero) is noise: it gets a pivot at rounding level, but does
    not enter later sources.
    """
    size = gram.shape[-1]
    floor = size * torch.finfo(gram.dtype).eps
    factor = torch.zeros_like(gram)
    dependent = torch.zeros(gram.shape[:2], dtype=torch.bool, device=gram.device)
    for j in range(size):
        column = gram[:, j:, j] - (factor[:, j:, :j] @ factor[:, j, :j, None]).squeeze(-1)
        dependent[:, j] = column[:, 0] <= floor
        column = column.masked_fill(dependent[:, j, None], 0.0)
        column[:, 0].clamp_(min=floor)
        factor[:, j:, j] = column / column[:, :1].sqrt()
    return factor, dependent


def _hidden(inverse: Tensor, factor: Tensor, dependent: Tensor, reach: Tensor, *, width: int) -> Tensor:
    """Weights that nothing determines, ``(token, reader, source)``.

    Row j of the inverse factor, times its pivot, is a dependent source j minus its combination of earlier ones: every
    source in it can trade weight with the others. With as many sources as channels any input fits, so none is known.
    """
    combination = inverse * factor.diagonal(dim1=-2, dim2=-1)[..., None]
    traded = dependent[..., None] & (combination.abs() > TRADED)
    hidden = reach.to(inverse.dtype) @ traded.to(inverse.dtype) > 0
    return hidden | (reach.sum(-1, keepdim=True) >= width)


def _error_bound(noise: Tensor, size: Tensor, inverse_gram: Tensor) -> Tensor:
    """Error of each contribution's size, from noise in the input and from the normal equations.

    The conditioning of the normal equations is squared, and their rounding in the worst direction reaches all weights.

    Args:
        noise: ``(token, reader)``: rounding of the input as the model formed it, relative to the largest sum it had to
            hold so far, or what the fit leaves over if that is more.
        size: ``(token, reader)``: that largest sum.
        inverse_gram: ``(token, reader, source)``: diagonal of the inverse of each prefix's unit-diagonal Gram matrix.
    """
    rounding = inverse_gram.shape[-1] * torch.finfo(inverse_gram.dtype).eps * size[:, :, None]
    worst = inverse_gram.amax(-1, keepdim=True).sqrt()
    return inverse_gram.sqrt() * (noise[:, :, None] + rounding * worst)
