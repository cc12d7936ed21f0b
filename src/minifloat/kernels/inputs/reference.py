"""`round_inputs` and `quantize_inputs` in plain torch: the fallback without a kernel, and the reference in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ActivationSpec


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """Implement `minifloat.kernels.inputs.round_inputs`."""
    return dequantize_activation(*quantize_activation(x, spec, scale), spec)


def quantize_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Implement `minifloat.kernels.inputs.quantize_inputs`; `rows` is the number of rows of the codes."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
    codes, grid = quantize_activation(padded, spec, scale)
    if spec.granularity == TENSOR:
        return codes, grid[:1, :1]
    return codes, grid.t().contiguous().t()
