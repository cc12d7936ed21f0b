"""From a Hessian to the feedback that error-compensating rounding applies: order of columns, damping, factorization.

GPTQ rounds one column at a time and moves the error to the columns that are not rounded yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import SingularHessianError
from minifloat.kernels.rounding import gram
from minifloat.quantize.rounding.cholesky import cholesky_, for_each_tile, tiles

#: Share of the mean diagonal that is added to the diagonal (GPTQ's ``percdamp``).
DAMPING = 0.01
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
    damped = torch.empty(hessian.shape, dtype=torch.float64)
    for rows in tiles(len(order)):
        damped[rows] = hessian[last_first[rows]][:, last_first].double()
    damped.diagonal()[dead] = mean  # any positive value: no other column exchanges errors with a dead one
    added = 0.0
    while True:
        damped.diagonal().add_((damping - added) * mean)
        added = damping
        if cholesky_(damped):
            break
        damping *= _DAMPING_GROWTH
        if damping > _LARGEST_DAMPING:
            raise SingularHessianError(
                f"{name}: the second moments of its inputs are not positive definite, even with {added:g} of the "
                "mean diagonal added; use more calibration text, leave the module out (--exclude), or round the whole "
                "model with --method nearest"
            )
    scale = damped.diagonal().clone()
    matrix = torch.empty_like(hessian)
    # LDLQ (QuIP, arXiv 2307.13304, theorem 6): with H = (U + I) D (U + I)', U strictly upper triangular, column k is
    # rounded at w_k + sum over j < k of (w_j - q_j) U_jk. It gives GPTQ's updates without an inverse.
    for rows in tiles(len(order)):
        unit = (damped[rows] / scale).tril_(rows.start - 1)  # column j of row i stays where j < i
        matrix[len(order) - rows.stop : len(order) - rows.start] = unit.float().flip(0, 1)
    return Feedback(order, matrix, scale.square().flip(0), damping, int(dead.sum()))


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
