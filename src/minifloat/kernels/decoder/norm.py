"""`Norm` and `Rotary`, and the checks of tensors that all parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight + bias``; `centered`: of ``x - mean(x)``."""

    weight: Tensor  #: float32 ``[n]``, ones where the model has no weight
    eps: float
    bias: Tensor | None = None  #: float32 ``[n]`` or None
    centered: bool = False

    def check(self, name: str, size: int) -> None:
        expect(name, self.weight, (size,))
        if self.bias is not None:
            expect(f"{name}.bias", self.bias, (size,))

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.plain(x) * self.weight
        return normed if self.bias is None else normed + self.bias

    def plain(self, x: Tensor) -> Tensor:
        if self.centered:
            x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)


@dataclass(frozen=True, eq=False)
class Rotary:
    inv_freq: Tensor  #: float32 ``[r]``: radians per position of each pair
    scaling: float = 1.0
    interleaved: bool = False

    @property
    def dims(self) -> int:
        return 2 * self.inv_freq.numel()

    def check(self, name: str, head_dim: int) -> None:
        if self.inv_freq.ndim != 1 or self.dims > head_dim:
            raise ShapeError(name, f"expected at most [{head_dim // 2}], got {list(self.inv_freq.shape)}")
        expect(name, self.inv_freq, (self.inv_freq.numel(),))

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def rotate(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (part[:, None] for part in turns)
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return torch.cat([pairs.flatten(-2), rest], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
