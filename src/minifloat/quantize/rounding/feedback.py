"""From a Hessian to the feedback that error-compensating rounding applies: order of columns, damping, factorization.

GPTQ rounds one column at a time and moves the error to the columns that are not rounded yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import SingularHessianError
from minifloat.kernels.rounding import ROW_BLOCK, gram
from minifloat.quantize.rounding.cholesky import cholesky_, for_each_tile, tiles

#: Share of the mean diagonal that is added to the diagonal (GPTQ's ``percdamp``).
DAMPING = 0.01
#: The same for the moments of a block of outputs.
ROW_DAMPING = 0.05
#: Factor by which the damping grows until the factorization succeeds, and its largest value.
_DAMPING_GROWTH, _LARGEST_DAMPING = 10.0, 10.0


@dataclass(frozen=True)
class Feedback:
    """The feedback between columns in the order in which they are rounded."""

    order: Tensor  # int64 ``[K]``, columns by falling diagonal of the Hessian
    matrix: Tensor  # float32 ``[K, K]``, strictly upper triangular U: the factor of each earlier column's error
    scale: Tensor  # float64 ``[K]``, the diagonal of D
    damping: float
    dead: int


def factorize(hessian: Tensor, name: str, damping: float = DAMPING) -> Feedback:
    diagonal = hessian.diagonal().double()
    if not bool(diagonal.isfinite().all()):
        raise SingularHessianError(f"{name}: the second moments of its inputs are NaN or Inf")
    order = torch.argsort(diagonal, descending=True, stable=True)
    last_first = order.flip(0)
    dead = diagonal[last_first] <= 0
    mean = float(diagonal[last_first][~dead].mean()) if not bool(dead.all()) else 1.0
    diagonal = torch.where(dead, mean, diagonal[last_first])  # no other column exchanges errors with a dead one
    while not cholesky_(blocks := _lower_blocks(hessian, last_first, diagonal + damping * mean)):
        if damping * _DAMPING_GROWTH > _LARGEST_DAMPING:
            raise SingularHessianError(
                f"{name}: the second moments of its inputs are not positive definite, even with {damping:g} of the "
                "mean diagonal added; use more calibration text, leave the module out (--exclude), or round the whole "
                "model with --method nearest"
            )
        damping *= _DAMPING_GROWTH
    parts = tiles(len(order))
    scale = torch.cat([block[:, part].diagonal() for block, part in zip(blocks, parts, strict=True)])
    matrix = torch.zeros_like(hessian)  # pages below its diagonal are never touched
    # LDLQ (QuIP, arXiv 2307.13304, theorem 6): with H = (U + I) D (U + I)', U strictly upper triangular, column k is
    # rounded at w_k + sum over j < k of (w_j - q_j) U_jk. It gives GPTQ's updates without an inverse.
    for rows in reversed(parts):
        unit = (blocks.pop() / scale[: rows.stop]).tril_(rows.start - 1)  # column j of row i stays where j < i
        matrix[len(order) - rows.stop : len(order) - rows.start, len(order) - rows.stop :] = unit.float().flip(0, 1)
    return Feedback(order, matrix, scale.square().flip(0), damping, int(dead.sum()))


def _lower_blocks(hessian: Tensor, order: Tensor, diagonal: Tensor) -> list[Tensor]:
    """Return the lower triangle of a matrix in some order, with another diagonal, as `cholesky_` takes it.

    In float64 a triangle is as large as the whole matrix in float32.
    """
    blocks = []
    for rows in tiles(len(order)):
        block = hessian[order[rows]][:, order[: rows.stop]].double()
        block[:, rows].diagonal().copy_(diagonal[rows])
        blocks.append(block)
    return blocks


@dataclass(frozen=True)
class RowFeedback:
    """The feedback between the rows of each block of a weight in the order in which they are rounded."""

    order: Tensor  # int64 ``[N]``, rows, within each block by falling diagonal
    matrix: Tensor  # float32 ``[N, ROW_BLOCK]``, strictly upper triangular in each block


def factorize_rows(moments: Tensor, rows: int) -> RowFeedback:
    """Return the feedback between the rows of a weight, from moments ``[N / ROW_BLOCK, ROW_BLOCK, ROW_BLOCK]``.

    LDLQ on the side of the outputs, as YAQA does it (arXiv 2505.22988), within blocks. Rows that pad the last block,
    and those without gradients, exchange no errors.
    """
    diagonal = moments.diagonal(dim1=1, dim2=2).double()
    order = diagonal.argsort(dim=1, descending=True, stable=True)  # rows of padding, whose moments are 0, stay last
    sorted_ = (
        moments.double().gather(1, order[:, :, None].expand_as(moments)).gather(2, order[:, None].expand_as(moments))
    )
    sorted_.diagonal(dim1=1, dim2=2).add_(
        ROW_DAMPING * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    )
    lower = torch.linalg.cholesky(sorted_.flip(1, 2))
    unit = (lower / lower.diagonal(dim1=1, dim2=2)[:, None]).tril(-1).flip(1, 2)
    first = torch.arange(len(moments))[:, None] * ROW_BLOCK
    return RowFeedback((order + first).flatten()[:rows], unit.float().reshape(-1, ROW_BLOCK)[:rows].contiguous())


def regress(products: Tensor, feedback: Feedback) -> Tensor:
    """Return ``products (H + l I)^-1`` in float32, with the damping l of the factorization of H."""
    result = torch.empty_like(products)
    upper = feedback.matrix

    def solve(rows: slice) -> None:
        ordered = products[rows][:, feedback.order].T
        half = torch.linalg.solve_triangular(upper, ordered, upper=True, unitriangular=True)
        half /= feedback.scale[:, None]
        result[rows, feedback.order] = torch.linalg.solve_triangular(upper.T, half, upper=False, unitriangular=True).T

    with for_each_tile() as for_each:
        for_each(solve, tiles(len(products)))
    return result


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two float32 matrices ``[M, K]`` and ``[K, N]``, the same bits for any number of threads."""
    product = left.new_zeros(left.shape[0], right.shape[1])
    gram(left.T.contiguous(), right, product)
    return product
