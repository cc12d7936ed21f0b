"""Cholesky factorization on all cores, with the same bits for any number of threads.

A library's factorization sums in an order that depends on the number of its threads. Here a matrix is cut into tiles
of a fixed size, each tile is computed by one thread, and threads share the tiles. The algorithm is the right-looking
one of LAPACK's ``potrf`` (Golub and Van Loan, Matrix Computations, section 4.2.9).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import TypeAlias

import torch
from torch import Tensor

from minifloat.kernels import threads

#: Rows and columns of a tile. Sums, and so codes, depend on it.
_TILE = 512

#: Calls a function with each item, on all threads, and returns when all calls have.
ForEach: TypeAlias = Callable[[Callable[[slice], object], Iterable[slice]], None]


def cholesky_(matrix: Tensor) -> bool:
    """Overwrite the lower triangle of a symmetric float64 ``[K, K]`` by its Cholesky factor; return whether it has one.

    Above the diagonal the matrix keeps its values, except within the tiles on the diagonal. A matrix that is not
    positive definite is left as it was.
    """
    parts = tiles(len(matrix))
    diagonal = [matrix[part, part].clone() for part in parts]
    with for_each_tile() as for_each:
        if all(_eliminate(matrix, parts[number:], for_each) for number in range(len(parts))):
            return True
    for part, values in zip(parts, diagonal, strict=True):
        matrix[part.stop :, part] = matrix[part, part.stop :].T
        matrix[part, part] = values
    return False


def tiles(size: int) -> list[slice]:
    return [slice(start, min(start + _TILE, size)) for start in range(0, size, _TILE)]


@contextmanager
def for_each_tile() -> Iterator[ForEach]:
    """Share calls between threads, in each of which a library computes alone."""
    count, known, inference = threads.count(), torch.get_num_threads(), torch.is_inference_mode_enabled()

    def call_in_mode(call: Callable[[slice], object], item: slice) -> None:
        with torch.inference_mode(inference):  # each thread has a mode of its own
            call(item)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as pool:

            def for_each(call: Callable[[slice], object], items: Iterable[slice]) -> None:
                for _ in pool.map(call_in_mode, repeat(call), items):
                    pass

            yield for_each
    finally:
        torch.set_num_threads(known)


def _eliminate(matrix: Tensor, parts: list[slice], for_each: ForEach) -> bool:
    """Compute the columns of the factor in the first of the tiles that remain, and take their products off the rest."""
    first, below = parts[0], parts[1:]
    factor, failed = torch.linalg.cholesky_ex(matrix[first, first])
    if int(failed):
        return False
    matrix[first, first] = factor

    def solve(rows: slice) -> None:
        matrix[rows, first] = torch.linalg.solve_triangular(factor.T, matrix[rows, first], upper=True, left=False)

    def subtract(rows: slice) -> None:
        for columns in below:
            if columns.start <= rows.start:
                matrix[rows, columns].addmm_(matrix[rows, first], matrix[columns, first].T, alpha=-1.0)

    for_each(solve, below)
    for_each(subtract, reversed(below))
    return True
