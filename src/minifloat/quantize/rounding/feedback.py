"""From a Hessian to the feedback that error-compensating rounding applies: order of columns, damping, factorization.

GPTQ rounds one column at a time and moves the error to the columns that are not rounded yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import SingularHessianError
from minifloat.kernels.rounding import gram

#: Share of the mean diagonal that is added to the diagonal (GPTQ's ``percdamp``).
DAMPING = 0.01
#: Factor by which the damping grows until the factorization succeeds, and its largest value.
_DAMPING_GROWTH, _LARGEST_DAMPING = 10.0, 10.0


@dataclass(frozen=True)
class Feedback:
    """The feedback between columns in the order in which they are rounded."""

    order: Tensor  # int64 ``[K]``, columns by falling diagonal of the Hessian
    matrix: Tensor  # float32 ``[K, K]``, strictly upper triangular: the factor of each earlier column's error
    lower: Tensor  # float32 ``[K, K]``, the Cholesky factor of the damped Hessian with its columns in reversed order
    damping: float
    dead: int


def factorize(hessian: Tensor, name: str) -> Feedback:
    """Return the feedback that a Hessian gives."""
    diagonal = hessian.diagonal().double()
    if not bool(diagonal.isfinite().all()):
        raise SingularHessianError(f"{name}: the second moments of its inputs are NaN or Inf")
    order = torch.argsort(diagonal, descending=True, stable=True)
    last_first = order.flip(0)
    dead = diagonal[last_first] <= 0
    mean = float(diagonal[last_first][~dead].mean()) if not bool(dead.all()) else 1.0
    damped = hessian[last_first][:, last_first].double()
    damped.diagonal()[dead] = mean  # any positive value: no other column exchanges errors with a dead one
    damping, added = DAMPING, 0.0
    while True:
        damped.diagonal().add_((damping - added) * mean)
        added = damping
        with one_thread():
            lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            break
        damping *= _DAMPING_GROWTH
        if damping > _LARGEST_DAMPING:
            raise SingularHessianError(
                f"{name}: the second moments of its inputs are not positive definite, even with {added:g} of the "
                "mean diagonal added; use more calibration text, leave the module out (--exclude), or round the whole "
                "model with --method nearest"
            )
    del damped
    # LDLQ (QuIP, arXiv 2307.13304, theorem 6): with H = (U + I) D (U + I)', U strictly upper triangular, column k is
    # rounded at w_k + sum over j < k of (w_j - q_j) U_jk. It gives GPTQ's updates without an inverse.
    matrix = (lower / lower.diagonal()).tril_(-1).float().flip(0, 1).contiguous()
    return Feedback(order, matrix, lower.float(), damping, int(dead.sum()))


def regress(products: Tensor, feedback: Feedback) -> Tensor:
    """Return ``products (H + l I)^-1`` in float32, with the damping l of the factorization of H."""
    last_first = feedback.order.flip(0)
    halves = products[:, last_first].T.chunk(2, dim=1)  # always two, so that threads do not change any sum
    with one_thread(), ThreadPoolExecutor(2) as pool:
        solutions = pool.map(lambda half: torch.cholesky_solve(half.contiguous(), feedback.lower), halves)
        solution = torch.cat(list(solutions), dim=1).T
    result = torch.empty_like(products)
    result[:, last_first] = solution
    return result


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two float32 matrices ``[M, K]`` and ``[K, N]``, the same bits for any number of threads."""
    product = left.new_zeros(left.shape[0], right.shape[1])
    gram(left.T.contiguous(), right, product)
    return product


@contextmanager
def one_thread() -> Iterator[None]:
    """Run linear algebra on one thread: a library's sums depend on the number of its threads, and codes must not."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
