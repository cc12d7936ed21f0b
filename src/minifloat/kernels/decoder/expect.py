"""Checks of the tensors of a decoder: each names the field, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import PackedWeight


def expect(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Check that a tensor has a shape and one of some dtypes, and is contiguous on the CPU."""
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeError(name, f"expected {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes or not tensor.is_cpu or not tensor.is_contiguous():
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        actual = f"{tensor.dtype} on {tensor.device}{'' if tensor.is_contiguous() else ', not contiguous'}"
        raise UnsupportedTensorError(name, f"expected contiguous {names} on the CPU, got {actual}")


def expect_weights(name: str, weights: Sequence[PackedWeight], rows: int, cols: int) -> None:
    """Check that packed weights have `cols` columns and together `rows` rows."""
    shapes = [tuple(weight.shape) for weight in weights]
    if sum(count for count, _ in shapes) != rows or any(width != cols for _, width in shapes):
        raise ShapeError(name, f"expected {rows} rows of {cols}, got {shapes}")
    for weight in weights:
        weight.check()


def expect_biases(name: str, biases: Sequence[Tensor | None] | None, weights: Sequence[PackedWeight]) -> None:
    """Check that there is a bias or None for each of some weights, all of one dtype."""
    if biases is None:
        return
    if len(biases) != len(weights):
        raise ShapeError(name, f"expected {len(weights)}, got {len(biases)}")
    for bias, weight in zip(biases, weights, strict=True):
        if bias is not None:
            expect(name, bias, (weight.shape[0],), tuple(DTYPES))
    if len({bias.dtype for bias in biases if bias is not None}) > 1:
        raise UnsupportedTensorError(name, "expected one dtype for all")
