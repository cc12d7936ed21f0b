"""`round_inputs` and `quantize_inputs` in plain torch: what runs without a kernel, and what kernels are held to.

Arguments are validated by the caller, `minifloat.kernels.inputs`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ActivationSpec


def round_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """See `minifloat.kernels.inputs.round_inputs`."""
    return dequantize_activation(*quantize_activation(x, spec, scale), spec)


def quantize_inputs(x: Tensor, spec: ActivationSpec, scale: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """See `minifloat.kernels.inputs.quantize_inputs`; `rows` are those of the codes."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))
    codes, grid = quantize_activation(padded, spec, scale)
    if spec.granularity == TENSOR:
        return codes, grid[:1, :1]
    return codes, grid.t().contiguous().t()
