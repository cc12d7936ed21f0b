"""Granularities: the blocks of rows x columns of a matrix that share one scale; None is the whole extent.

In memory a scale grid always has two dimensions, ``[ceil(N / rows), ceil(K / cols)]``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Granularity:
    """The block of elements that shares one scale; None: all rows, or all columns."""

    name: str
    rows: int | None
    cols: int | None

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of one block of a matrix of `shape` ``(N, K)``, each at least 1."""
        return (self.rows or max(shape[0], 1), self.cols or max(shape[1], 1))

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scale grid of a matrix of `shape` ``(N, K)``; edge blocks may be partial."""
        rows, cols = self.block(shape)
        return (-(-shape[0] // rows), -(-shape[1] // cols))

    @property
    def row_multiple(self) -> int | None:
        """Number of rows that must stay together when a matrix is cut into row slabs; None for the whole matrix."""
        return self.rows

    def __str__(self) -> str:
        return self.name


TENSOR = Granularity("tensor", None, None)
CHANNEL = Granularity("channel", 1, None)
BLOCK_128 = Granularity("block 128x128", 128, 128)
GROUP_128 = Granularity("group 1x128", 1, 128)
GROUP_32 = Granularity("group 1x32", 1, 32)
GROUP_16 = Granularity("group 1x16", 1, 16)
#: One scale for each row of an activation ``[M, K]``; the same block as CHANNEL.
TOKEN = Granularity("token", 1, None)

_NAMED = (BLOCK_128, GROUP_128, GROUP_32, GROUP_16)


def block_granularity(rows: int, cols: int) -> Granularity:
    """Return the granularity of blocks of this size: a declared one, or a new one for sizes of other tools."""
    if rows < 1 or cols < 1:
        raise ValueError(f"a block is at least 1x1, got {rows}x{cols}")
    for known in _NAMED:
        if (known.rows, known.cols) == (rows, cols):
            return known
    return Granularity(f"{'group' if rows == 1 else 'block'} {rows}x{cols}", rows, cols)
