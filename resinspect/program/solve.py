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

    A source whose norm is zero, or that lies in the span of earlier ones up to rounding, does not stop the solve: its
    pivot is floored, and every weight which that dependence leaves undetermined gets an error bound that says so.

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
    inverse = torch.linalg.solve_triangular(
        _cholesky(gram * scale[:, :, None] * scale[:, None, :]),
        torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device),
        upper=False,
    )
    inverse = inverse * scale[:, None, :]
    reach = torch.as_tensor(prefix, device=gram.device)[:, None] > torch.arange(gram.shape[-1], device=gram.device)
    projected = (inverse @ cross).mT * reach
    weight = projected @ inverse
    residual = (inputs - weight @ writes).norm(dim=-1)
    size = torch.maximum(inputs.norm(dim=-1), (weight.abs() * norm[:, None, :]).sum(-1))
    noise = torch.maximum(eps * size, residual)
    bound = _error_bound(noise, size, norm, reach.to(gram.dtype) @ inverse.square())
    bound = bound.masked_fill((norm == 0)[:, None, :], torch.inf)
    nan = torch.where(reach, 0.0, torch.nan)
    return Solution(weight + nan, bound + nan, (bound < IDENTIFIABLE) & reach)


def _cholesky(gram: Tensor) -> Tensor:
    """Lower factor of a unit-diagonal Gram matrix ``(token, S, S)``, pivots floored at rounding level."""
    size = gram.shape[-1]
    floor = size * torch.finfo(gram.dtype).eps
    factor = torch.zeros_like(gram)
    for j in range(size):
        column = gram[:, j:, j] - (factor[:, j:, :j] @ factor[:, j, :j, None]).squeeze(-1)
        # What is left of a dependent source is noise: it gets a pivot, but must not enter later sources.
        column *= column[:, :1] > floor
        column[:, 0].clamp_(min=floor)
        factor[:, j:, j] = column / column[:, :1].sqrt()
    return factor


def _error_bound(noise: Tensor, size: Tensor, norm: Tensor, inverse_gram: Tensor) -> Tensor:
    """Error of each weight from noise in the input, plus that of the normal equations (their conditioning is squared).

    Args:
        noise: ``(token, reader)``: rounding of the input as the model formed it, relative to the largest partial sum
            its contributions can add up to, or what the fit leaves over if that is more.
        size: ``(token, reader)``: that largest partial sum.
        norm: ``(token, source)``: of the writes.
        inverse_gram: ``(token, reader, source)``: diagonal of the inverse Gram matrix of each reader's prefix.
    """
    rounding = norm.shape[-1] * torch.finfo(inverse_gram.dtype).eps * norm[:, None, :] * inverse_gram
    return noise[:, :, None] * inverse_gram.sqrt() + size[:, :, None] * rounding
