"""`Slab`: the arguments of `quantize_rows` after validation, as every implementation takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.numerics.scheme import WeightSpec


@dataclass(frozen=True)
class Slab:
    """A slab of rows and the arrays that its quantization fills.

    Attributes:
        data: uint8, contiguous, not empty: the bytes of the slab.
        tensor_amax: The amax of the whole tensor if ``spec.needs_tensor_amax``, else None.
    """

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, int]
    spec: WeightSpec
    tensor_amax: float | None
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32] | npt.NDArray[np.uint8]
