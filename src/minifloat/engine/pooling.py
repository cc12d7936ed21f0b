"""`PooledText`: the hidden states of a text become its vector or its score while the prompt is computed in pieces."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minifloat.model.architecture.pooling import Pooling

#: The vector of a text, or its score alone: float32 ``[hidden]`` or ``[1]``.
Vector = NDArray[np.float32]


class PooledText:
    """Takes the rows of a text, each the product of the hidden state of a token with the head."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self.clear()

    @property
    def needs_all(self) -> bool:
        """Whether the rows of all tokens count, and not only that of the last."""
        return self._pooling.kind == "mean"

    def clear(self) -> None:
        """Forget all rows: the text is computed again."""
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, rows: Vector) -> None:
        """Add rows ``[tokens, width]`` of the next tokens, or the last one alone where only it counts."""
        if len(rows):
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total
            self._count += len(rows)

    def result(self) -> Vector:
        assert self._sum is not None
        vector = self._sum / self._count
        if self._pooling.task == "score":
            return (1 / (1 + np.exp(-vector)) if self._pooling.is_probability else vector).astype(np.float32)
        return normalized(vector) if self._pooling.normalize else vector.astype(np.float32)


def normalized(vector: NDArray[np.floating]) -> Vector:
    """Return a vector of length 1 in the same direction; zeros stay zeros."""
    length = float(np.linalg.norm(vector))
    return (vector / (length or 1.0)).astype(np.float32)
