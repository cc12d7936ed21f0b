"""`round_inputs` in plain torch: what runs without the native library, and what that is held to.

Arguments are validated by the caller, `minifloat.kernels.inputs`.
"""

from __future__ import annotations

from torch import Tensor

from minifloat.quantize.activation import dequantize_activation, quantize_activation
from minifloat.scheme import ActivationSpec


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """See `minifloat.kernels.inputs.round_inputs`."""
    return dequantize_activation(*quantize_activation(x, spec, scale), spec)
