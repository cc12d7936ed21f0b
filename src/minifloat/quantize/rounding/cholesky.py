"""Cholesky factorization on all cores, with the same bits for any number of threads.

A library's factorization sums in an order that depends on the number of its threads. Here a matrix is cut into tiles
of a fixed size, each tile is computed by one thread, and threads share the tiles. The algorithm is the right-looking
one of LAPACK's ``potrf`` (Golub and Van Loan, Matrix Computations, section 4.2.9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor

from minifloat.kernels import threads

#: Rows and columns of a tile. Sums, and so codes, depend on it.
_TILE = 512

#: Calls a function with each item, on all threads, and returns when all calls have.
ForEach: TypeAlias = Callable[[Callable[[Any], object], Iterable[Any]], None]


def cholesky_(blocks: Sequence[Tensor]) -> bool:
    """Overwrite the lower triangle of a symmetric matrix by its Cholesky factor; return whether it has one.

    Args:
        blocks: The rows of each of the `tiles` of ``[K, K]``, float64, up to the end of the tile on the diagonal, whose
            upper half becomes zero. They have no meaning after a matrix that is not positive definite.
    """
    parts = tiles(sum(map(len, blocks)))
    with for_each_tile() as for_each:
        return all(_eliminate(blocks, parts, number, for_each) for number in range(len(parts)))


def tiles(size: int) -> list[slice]:
    return [slice(start, min(start + _TILE, size)) for start in range(0, size, _TILE)]


@contextmanager
def for_each_tile() -> Iterator[ForEach]:
    """Share calls between threads, in each of which a library computes alone."""
    count, known, inference = threads.count(), torch.get_num_threads(), torch.is_inference_mode_enabled()

    def call_in_mode(call: Callable[[Any], object], item: Any) -> None:
        with torch.inference_mode(inference):  # each thread has a mode of its own
            call(item)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:

            def for_each(call: Callable[[Any], object], items: Iterable[Any]) -> None:
                for _ in pool.map(call_in_mode, repeat(call), items):
                    pass

            yield for_each
    finally:
        torch.set_num_threads(known)


def _eliminate(blocks: Sequence[Tensor], parts: list[slice], number: int, for_each: ForEach) -> bool:
    """Compute the columns of the factor in one tile, and take their products off the rows below it."""
    first, below = parts[number], range(number + 1, len(parts))
    factor, failed = torch.linalg.cholesky_ex(blocks[number][:, first])
    if int(failed):
        return False
    blocks[number][:, first] = factor

    def solve(row: int) -> None:
        rows = blocks[row]
        rows[:, first] = torch.linalg.solve_triangular(factor.T, rows[:, first], upper=True, left=False)

    def subtract(row: int) -> None:
        rows = blocks[row]
        for other in range(number + 1, row + 1):
            rows[:, parts[other]].addmm_(rows[:, first], blocks[other][:, first].T, alpha=-1.0)

    for_each(solve, below)
    for_each(subtract, reversed(below))
    return True
