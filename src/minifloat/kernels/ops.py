"""The products as ops of torch, ``torch.ops.minifloat.*``, for `torch.compile` and `torch.export`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.linear import cpu
from minifloat.kernels.pack import Pointers, is_aligned
from minifloat.kernels.pack.layout import Header


def is_eager(x: Tensor, biases: Sequence[Tensor | None] | None = None) -> bool:
    """Return whether a call may go directly to the library: nothing traces it, and no input requires a gradient."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if not torch.is_grad_enabled():
        return True
    return not (x.requires_grad or (biases and any(bias is not None and bias.requires_grad for bias in biases)))


@torch.library.custom_op("minifloat::linear", mutates_args=(), device_types="cpu")
def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Sequence[int],
    int8_inputs: bool = False,
) -> Tensor:
    """Compute ``x @ W.T + bias`` for several packed weights, results side by side."""
    _check(x, weights, biases, rows)
    pointers = Pointers([weight.data_ptr() for weight in weights], rows, x.shape[-1])
    return cpu.run(x, pointers, biases or None, int8_inputs)


@linear.register_fake
def _(x: Tensor, weights: object, biases: object, rows: Sequence[int], int8_inputs: bool = False) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(rows)))


@torch.library.custom_op("minifloat::moe_linear", mutates_args=(), device_types="cpu")
def moe_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    x_rows: Tensor | None,
    biases: Tensor | None,
    rows: int,
    int8_inputs: bool = False,
) -> Tensor:
    """Compute the product whose row t is row ``x_rows[t]`` of `x` times the expert that owns row t."""
    if x.ndim != 2:
        raise ShapeError("x", f"expected [M, K], got {list(x.shape)}")
    parts = () if biases is None else biases.unbind()
    _check(x, weights, parts, [rows] * len(weights))
    check_groups(offsets, x_rows, len(weights), x.shape[0])
    pointers = Pointers([weight.data_ptr() for weight in weights], [rows] * len(weights), x.shape[-1])
    return cpu.run_experts(x, pointers, offsets, x_rows, biases, int8_inputs)


@moe_linear.register_fake
def _(
    x: Tensor, weights: object, offsets: object, x_rows: Tensor | None, biases: object, rows: int, *_: object
) -> Tensor:
    return x.new_empty((x.shape[0] if x_rows is None else x_rows.shape[0], rows))


def check_groups(offsets: Tensor, x_rows: Tensor | None, experts: int, tokens: int) -> None:
    """Validate `offsets` and `x_rows` of `moe_linear`, which the kernels use as indices."""
    for name, tensor in (("offsets", offsets), ("x_rows", x_rows)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
            raise UnsupportedTensorError(name, f"expected int64 on the CPU, got {tensor.dtype}, {tensor.device}")
        if tensor.ndim != 1 or not tensor.is_contiguous():
            raise ShapeError(name, f"expected one contiguous dimension, got {list(tensor.shape)}")
    total = tokens if x_rows is None else x_rows.shape[0]
    values = offsets.tolist()
    if len(values) != experts + 1 or values[0] != 0 or values[-1] != total or sorted(values) != values:
        raise ShapeError("offsets", f"expected {experts + 1} numbers that do not fall, from 0 to {total}, got {values}")
    if x_rows is not None and total:
        low, high = (int(bound) for bound in x_rows.aminmax())
        if low < 0 or high >= tokens:
            raise ShapeError("x_rows", f"rows {low} to {high} of the {tokens} of x")


def _check(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: Sequence[int]) -> None:
    if not weights or len(rows) != len(weights):
        raise ShapeError("weights", f"{len(weights)} weights and {len(rows)} rows")
    if x.ndim == 0:
        raise ShapeError("x", "expected [..., K], got a scalar")
    cpu.check(x, x.shape[-1], rows, biases or None)
    headers = [_header(weight, n, x.shape[-1]) for weight, n in zip(weights, rows, strict=True)]
    if len({(header.element, header.grid) for header in headers}) != 1:
        raise UnsupportedTensorError("weights", "several kinds of weights in one call; multiply them one by one")


def _header(weight: Tensor, rows: int, cols: int) -> Header:
    if weight.dtype != torch.uint8 or not weight.is_contiguous() or not is_aligned(weight):
        raise UnsupportedTensorError("weight", f"expected contiguous, 64-byte aligned uint8, got {weight.dtype}")
    header = Header.read(bytes(weight[: Header.FORMAT.size].numpy()))
    if isinstance(header, str):
        raise UnsupportedTensorError("weight", header)
    if (header.rows, header.cols) != (rows, cols) or header.total > weight.numel():
        raise ShapeError("weight", f"expected a packed weight {rows}x{cols}, got one of {header.rows}x{header.cols}")
    return header
