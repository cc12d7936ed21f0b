"""Draws of tokens from whole distributions over a vocabulary; weights and their sums are float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minifloat.errors import ShapeError
from minifloat.kernels import native, threads
from minifloat.kernels.native import STRUCTS

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]


def weights_of(logits: Logits, largest: np.float32, temperature: float) -> Weights:
    """Return the probabilities of tokens, divided by that of the most probable token."""
    scaled = logits.astype(np.float64)
    scaled -= np.float64(largest)  # before the division, by which both may become infinite
    with np.errstate(over="ignore"):
        scaled /= temperature
    return np.exp(scaled, out=scaled)


def invert(weights: Weights, uniform: float) -> int:
    """Return the first index whose cumulative weight is above `uniform` times the total."""
    sums = weights.cumsum()
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(index, len(weights) - 1)


def draw_rows(
    logits: Logits,
    largest: Sequence[float],
    temperatures: Sequence[float],
    uniforms: Sequence[float],
    *,
    impl: str = "auto",
) -> list[int]:
    """Return for each row of logits ``[R, V]``, whose largest is finite, the token drawn with a number in [0, 1)."""
    if logits.ndim != 2 or not len(logits) == len(largest) == len(temperatures) == len(uniforms):
        raise ShapeError("logits", f"expected [{len(uniforms)}, V], got {list(logits.shape)}")
    if logits.dtype == np.float32 and logits.strides[1] == logits.itemsize and native.runs("draw", impl):
        return _draw_native(logits, largest, temperatures, uniforms)
    rows = zip(logits, largest, temperatures, uniforms, strict=True)
    return [invert(weights_of(row, np.float32(most), heat), uniform) for row, most, heat, uniform in rows]


def _draw_native(
    logits: Logits, largest: Sequence[float], temperatures: Sequence[float], uniforms: Sequence[float]
) -> list[int]:
    rows, vocab = logits.shape
    numbers = np.array([largest, temperatures, uniforms], np.float64)
    tokens = np.empty(rows, np.int64)
    args = STRUCTS["draw_args"](
        logits=logits.ctypes.data,
        rows=rows,
        vocab=vocab,
        stride=logits.strides[0] // logits.itemsize if rows > 1 else vocab,
        largest=numbers[0].ctypes.data,
        temperatures=numbers[1].ctypes.data,
        uniforms=numbers[2].ctypes.data,
        threads=threads.count(),
        tokens=tokens.ctypes.data,
    )
    native.require().call("draw", args)
    drawn: list[int] = tokens.tolist()
    return drawn
