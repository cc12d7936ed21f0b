"""`Norm`: RMS norms and layer norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.kernels.decoder.expect import expect


@dataclass(frozen=True, eq=False)
class Norm:
    """``x / sqrt(mean(x^2) + eps) * weight + bias``; `centered`: of ``x - mean(x)``.

    Attributes:
        weight: float32 ``[n]``, ones where the model has no weight.
        bias: float32 ``[n]`` or None.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centered: bool = False

    def check(self, name: str, size: int) -> None:
        """Check that the norm is one of rows of `size`; `name` is the prefix of field names in errors."""
        expect(name, self.weight, (size,))
        if self.bias is not None:
            expect(f"{name}.bias", self.bias, (size,))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of the rows of a float32 tensor ``[.., n]``."""
        normed = self.plain(x) * self.weight
        return normed if self.bias is None else normed + self.bias

    def plain(self, x: Tensor) -> Tensor:
        """Return the norm without weight and bias."""
        if self.centered:
            x = x - x.mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
