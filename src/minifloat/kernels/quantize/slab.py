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
        dtype: ``"BF16"``, ``"F16"`` or ``"F32"``.
        shape: ``(R, K)``.
        spec: Format, scales and granularity of the quantized weight.
        tensor_amax: The amax of the whole tensor if ``spec.needs_tensor_amax``, else None.
        codes: uint8, filled with the codes.
        scales: float32 or uint8, filled with the scales.
    """

    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, int]
    spec: WeightSpec
    tensor_amax: float | None
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32] | npt.NDArray[np.uint8]
