"""Numbers as their bytes: scales widened to float32, elements decoded, float32 rounded to 16 bits; numpy, no torch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.numerics.formats import E8M0, ElementFormat

_HALF_BITS = 16  # low bits of a float32 that a bfloat16 lacks
_BYTE_BITS = 8

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@cache
def value_table(element: ElementFormat) -> Floats:
    """Return the value of each code of a format of at most 8 bits; callers share the array and must not write to it."""
    return np.array(element.values, np.float32)


@cache
def _pair_table(element: ElementFormat) -> npt.NDArray[np.uint64]:
    """Return for each byte of two 4-bit codes both values, low nibble first, as the bits of two float32."""
    values = value_table(element)
    pairs = np.stack(np.broadcast_arrays(values[None, :], values[:, None]), axis=-1)
    return np.ascontiguousarray(pairs.reshape(-1, 2)).view(np.uint64).reshape(-1)


def decode_elements(codes: Bytes, element: ElementFormat, out: Floats) -> None:
    """Write the values of codes, two to a byte for formats of 4 bits (the even element in the low nibble)."""
    if element.bits * 2 == _BYTE_BITS:
        np.take(_pair_table(element), codes, out=out.view(np.uint64), mode="clip")
    else:
        np.take(value_table(element), codes, out=out, mode="clip")


def widen(data: Bytes, dtype: str) -> Floats:
    """Return scales as float32, which holds every value of their formats."""
    if dtype == "F32":
        return data.view(np.float32)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << _HALF_BITS).view(np.float32)
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    widened: npt.NDArray[Any] = value_table(E8M0)[data]
    return widened


def narrow(values: Floats, dtype: str) -> tuple[Bytes, int]:
    """Return the bytes of float32 values in a wider or equal dtype of checkpoints, rounded to nearest, ties to even."""
    rounded: npt.NDArray[Any] = values.reshape(-1)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            rounded = rounded.astype(np.float16)
    finite = np.isfinite(rounded)
    if dtype == "BF16":
        bits = rounded.view(np.uint32)
        half = np.uint32((1 << (_HALF_BITS - 1)) - 1)
        rounded = ((bits + half + ((bits >> _HALF_BITS) & 1)) >> _HALF_BITS).astype(np.uint16)
        finite &= np.isfinite((rounded.astype(np.uint32) << _HALF_BITS).view(np.float32))
    return rounded.view(np.uint8), int(rounded.size - np.count_nonzero(finite))
