"""The product on a GPU as an op of torch, ``torch.ops.minifloat.gpu_linear``: what `torch.compile` sees of it.

As in `minifloat.kernels.ops`, eager calls pass by the dispatcher. Imports triton only when it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.linear.triton.layout import Order
from minifloat.kernels.linear.triton.weight import GpuWeight
from minifloat.numerics.formats import get_format
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity, block_granularity
from minifloat.numerics.scheme import WeightSpec


def check(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> None:
    """See that `run` may take its arguments.

    Raises:
        ShapeError: `x` or `bias` does not fit the weight.
        UnsupportedTensorError: A dtype that there is no kernel for, or another device than the weight's.
    """
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
    """``x @ W.T + bias``.

    Args:
        x: ``[..., K]``, any strides.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.

    Returns:
        ``[..., N]``, the dtype of `x`.
    """
    from minifloat.kernels.linear.triton.product import multiply

    matrix = x.reshape(-1, x.shape[-1])
    if matrix.stride(-1) != 1:
        matrix = matrix.contiguous()
    y = matrix.new_empty((matrix.shape[0], weight.shape[0]))
    with torch.cuda.device(x.device):
        multiply(matrix, weight, None if bias is None else bias.contiguous(), y)
    return y.view(*x.shape[:-1], weight.shape[0])


def traced(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> Tensor:
    """`run` through torch's dispatcher."""
    spec = weight.spec
    block = (spec.granularity.rows or 0, spec.granularity.cols or 0)
    y: Tensor = torch.ops.minifloat.gpu_linear(
        x, bias, weight.codes, weight.row_scale, weight.factors, weight.block_scale,
        spec.element.name, spec.scale.name, block, weight.shape, int(weight.order),
    )  # fmt: skip
    return y


@torch.library.custom_op("minifloat::gpu_linear", mutates_args=(), device_types="cuda")
def gpu_linear(
    x: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    row_scale: Tensor,
    factors: Tensor | None,
    block_scale: Tensor | None,
    element: str,
    scale: str,
    block: list[int],
    shape: list[int],
    order: int,
) -> Tensor:
    """``x @ W.T + bias`` for the tensors of a `GpuWeight`.

    Args:
        x: ``[..., K]``.
        bias: ``[N]`` or None.
        codes: As there.
        row_scale: As there.
        factors: As there.
        block_scale: As there.
        element: Name of the element format.
        scale: Name of the scale format.
        block: Rows and columns of the granularity, 0 for all.
        shape: N and K.
        order: As there.

    Returns:
        ``[..., N]``, the dtype of `x`.
    """
    spec = WeightSpec(get_format(element), _granularity(block[0], block[1]), get_format(scale))
    weight = GpuWeight(spec, (shape[0], shape[1]), Order(order), codes, row_scale, factors, block_scale)
    check(x, weight, bias)
    return run(x, weight, bias)


@gpu_linear.register_fake
def _(
    x: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    row_scale: Tensor,
    factors: Tensor | None,
    block_scale: Tensor | None,
    element: str,
    scale: str,
    block: list[int],
    shape: list[int],
    order: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


def _granularity(rows: int, cols: int) -> Granularity:
    if rows and cols:
        return block_granularity(rows, cols)
    known = {(each.rows or 0, each.cols or 0): each for each in (TENSOR, CHANNEL)}
    return known.get((rows, cols)) or Granularity(f"{rows or 'all'}x{cols or 'all'}", rows or None, cols or None)
