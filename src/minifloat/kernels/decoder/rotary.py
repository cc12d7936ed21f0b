"""`Rotary`: which pairs of dimensions of a head turn, and how fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.errors import ShapeError
from minifloat.kernels.decoder.expect import expect


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding. The first ``2 * len(inv_freq)`` dimensions of a head turn.

    Attributes:
        inv_freq: float32 ``[r]``: radians per position of each pair.
    """

    inv_freq: Tensor
    scaling: float = 1.0
    interleaved: bool = False

    @property
    def dims(self) -> int:
        """Number of dimensions that turn."""
        return 2 * self.inv_freq.numel()

    def check(self, name: str, head_dim: int) -> None:
        """Check that the embedding fits heads of `head_dim`."""
        if self.inv_freq.ndim != 1 or self.dims > head_dim:
            raise ShapeError(name, f"expected at most [{head_dim // 2}], got {list(self.inv_freq.shape)}")
        expect(name, self.inv_freq, (self.inv_freq.numel(),))

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions, float32 ``[T, r]`` each."""
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos() * self.scaling, angles.sin() * self.scaling

    def rotate(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads ``[T, heads, d]`` by the result of `turns`."""
        cos, sin = (part[:, None] for part in turns)
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
            return torch.cat([pairs.flatten(-2), rest], dim=-1)
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
