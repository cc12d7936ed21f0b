"""`linear` in plain PyTorch, the reference of all faster implementations: dequantizes and multiplies slab by slab."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.scheme import ActivationSpec
from minifloat.numerics.tensor import QuantizedTensor

#: Bytes of float32 that one slab of a dequantized weight takes.
SLAB_BYTES = 16 * 2**20


def linear(x: Tensor, weight: QuantizedTensor | Tensor, bias: Tensor | None, slab_bytes: int = SLAB_BYTES) -> Tensor:
    """Compute ``x @ weight.T + bias``, weight-only, with the numerics of `minifloat.kernels.linear.linear`."""
    if isinstance(weight, Tensor):
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    parts = []
    for rows in _slabs(weight, slab_bytes):
        slab_bias = None if bias is None else bias[rows]
        parts.append(torch.nn.functional.linear(x, weight.dequantize(x.dtype, rows), slab_bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def quantized_linear(
    x: Tensor,
    weight: QuantizedTensor | Tensor,
    bias: Tensor | None,
    activation: ActivationSpec,
    input_scale: Tensor | None,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` with a quantized `x`, with the numerics of `minifloat.kernels.linear.linear`."""
    codes, scale = quantize_activation(x, activation, input_scale)
    values = dequantize_activation(codes, scale, activation)
    return linear(values, weight, None if bias is None else bias.float()).to(x.dtype)


def _slabs(weight: QuantizedTensor, slab_bytes: int) -> list[slice]:
    """Return row ranges that cover the weight, cut between blocks (one block of all rows is cut anywhere)."""
    rows, cols = weight.shape
    multiple = weight.spec.granularity.row_multiple or 1
    fitting = slab_bytes // (cols * torch.float32.itemsize) if cols else rows
    step = max(fitting // multiple * multiple, multiple)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]
