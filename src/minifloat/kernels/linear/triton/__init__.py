"""`linear` on one NVIDIA GPU, an op of torch for `torch.compile` too; weights are decoded in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.linear.triton.config import why_not as why_unavailable
from minifloat.kernels.linear.triton.layout import Order
from minifloat.kernels.linear.triton.weight import GpuWeight, pack, why_not
from minifloat.numerics.formats import get_format
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity, block_granularity
from minifloat.numerics.scheme import WeightSpec

__all__ = ["GpuWeight", "check", "pack", "run", "traced", "why_not", "why_unavailable"]


def check(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> None:
    rows, cols = weight.shape
    if x.ndim == 0 or x.shape[-1] != cols:
        raise ShapeError("x", f"expected [..., {cols}] for a weight {rows}x{cols}, got {list(x.shape)}")
    if bias is not None and bias.shape != (rows,):
        raise ShapeError("bias", f"expected [{rows}] for a weight {rows}x{cols}, got {list(bias.shape)}")
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and (tensor.dtype not in DTYPES or tensor.device != weight.codes.device):
            expected = f"bfloat16, float16 or float32 on {weight.codes.device}, where the weight is"
            raise UnsupportedTensorError(name, f"expected {expected}, got {tensor.dtype} on {tensor.device}")


def run(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> Tensor:
    from minifloat.kernels.linear.triton.product import multiply

    matrix = x.reshape(-1, x.shape[-1])
    if matrix.stride(-1) != 1:
        matrix = matrix.contiguous()
    y = matrix.new_empty((matrix.shape[0], weight.shape[0]))
    with torch.cuda.device(x.device):
        multiply(matrix, weight, None if bias is None else bias.contiguous(), y)
    return y.view(*x.shape[:-1], weight.shape[0])


def traced(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> Tensor:
    """Call `run` through torch's dispatcher, so that `torch.compile` sees one op."""
    spec = weight.spec
    block = (spec.granularity.rows or 0, spec.granularity.cols or 0)
    y: Tensor = torch.ops.minifloat.gpu_linear(
        x, weight.shape, bias, weight.codes, weight.row_scale, weight.factors, weight.block_scale,
        spec.element.name, spec.scale.name, block, int(weight.order),
    )  # fmt: skip
    return y


@torch.library.custom_op("minifloat::gpu_linear", mutates_args=(), device_types="cuda")
def gpu_linear(
    x: Tensor,
    shape: list[int],
    bias: Tensor | None,
    codes: Tensor,
    row_scale: Tensor,
    factors: Tensor | None,
    block_scale: Tensor | None,
    element: str,
    scale: str,
    block: list[int],
    order: int,
) -> Tensor:
    """Compute ``x @ W.T + bias`` from the fields of a `GpuWeight`; ops of torch take tensors and numbers only."""
    spec = WeightSpec(get_format(element), _granularity(block[0], block[1]), get_format(scale))
    weight = GpuWeight(spec, (shape[0], shape[1]), Order(order), codes, row_scale, factors, block_scale)
    check(x, weight, bias)
    return run(x, weight, bias)


@gpu_linear.register_fake
def _(x: Tensor, shape: list[int], *_weight_and_bias: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


def _granularity(rows: int, cols: int) -> Granularity:
    if rows and cols:
        return block_granularity(rows, cols)
    known = {(each.rows or 0, each.cols or 0): each for each in (TENSOR, CHANNEL)}
    return known.get((rows, cols)) or Granularity(f"{rows or 'all'}x{cols or 'all'}", rows or None, cols or None)
