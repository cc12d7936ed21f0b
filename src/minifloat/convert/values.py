"""The arithmetic of a conversion: exact widening, and reciprocals with their rounding error."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.errors import ConversionError, NonFiniteError
from minifloat.numerics.formats import E8M0

_E8M0_VALUES = np.array(E8M0.values, np.float32)  # all are float32 numbers, the smallest a subnormal number
_HALF_BITS = 16  # low bits of a float32 that a bfloat16 lacks


class Reciprocal(NamedTuple):
    """The float32 nearest to a reciprocal, and its error.

    Attributes:
        value: The nearest float32.
        change: Relative difference from the true reciprocal; 0 where `value` is exact.
    """

    value: np.float32
    change: float


def widen(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Return scales as float32, which holds every value of their formats.

    Args:
        data: Bytes of whole elements.
        dtype: Safetensors dtype of the elements.
    """
    if dtype == "F32":
        return data.view(np.float32)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << _HALF_BITS).view(np.float32)
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    widened: npt.NDArray[Any] = _E8M0_VALUES[data]
    return widened


def reciprocal(checkpoint: Checkpoint, info: TensorInfo) -> Reciprocal:
    """Return the reciprocal of a stored scalar.

    Raises:
        NonFiniteError: The scalar is NaN or Inf.
        ConversionError: The scalar has no finite, normal reciprocal in float32.
    """
    value = widen(checkpoint.read(info.name), info.dtype)[0]
    if not np.isfinite(value):
        raise NonFiniteError(info.name, f"the scale is {value}")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1.0) / value
    if not np.isfinite(inverse) or abs(inverse) < np.finfo(np.float32).tiny:
        raise ConversionError(f"{info.name}: the scale {value} has no reciprocal in float32")
    return Reciprocal(
        inverse, abs(float(value) * float(inverse) - 1.0)
    )  # the product of two float32 is exact in float64
