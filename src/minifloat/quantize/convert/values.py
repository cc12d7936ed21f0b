"""The arithmetic of a conversion: reciprocals with their rounding error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.errors import ConversionError, NonFiniteError
from minifloat.model.layouts.values import widen


class Reciprocal(NamedTuple):
    """The float32 nearest to a reciprocal, and its error."""

    value: np.float32
    change: float


def reciprocal(checkpoint: Checkpoint, info: TensorInfo) -> Reciprocal:
    """Return the reciprocal of a stored scalar."""
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
