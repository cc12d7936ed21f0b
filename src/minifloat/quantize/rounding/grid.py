"""`Grid`: the values that each element of a weight can take once its scales are fixed; and the casts to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.kernels.quantize import quantize_rows
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.pack import pack_nibbles, unpack_nibbles
from minifloat.numerics.scale import cast_stats
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

#: Rows of a weight whose errors are computed at once.
_PIECE_ROWS = 128
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Grid:
    """A weight rounded to nearest: its scales stay, and a method may choose other codes."""

    nearest: QuantizedTensor

    @classmethod
    def of(cls, weight: Tensor, spec: WeightSpec, group_amax: float | None) -> Grid:
        """Return the grid of a weight."""
        rows, cols = weight.shape
        data = weight.contiguous().reshape(-1).view(torch.uint8).numpy()
        cast = quantize_rows(data, _NAMES[weight.dtype], (rows, cols), spec, tensor_amax=group_amax)
        scale = torch.from_numpy(cast.scales)
        divisor = None
        if spec.has_global_scale:
            from minifloat.numerics.divisor import scalar_global_divisor

            divisor = torch.tensor(scalar_global_divisor(group_amax or 0.0))
        return cls(QuantizedTensor(spec, (rows, cols), torch.from_numpy(cast.codes), scale, divisor))

    @property
    def spec(self) -> WeightSpec:
        """Storage format of the weight."""
        return self.nearest.spec

    def row_scales(self) -> Tensor:
        """Return the scales of each row, float32 ``[N, groups]``."""
        block_rows, _ = self.spec.granularity.block(self.nearest.shape)
        scales = self.nearest.block_scale().repeat_interleave(block_rows, 0)[: self.nearest.shape[0]]
        return scales.contiguous()

    def column_groups(self) -> Tensor:
        """Return the index of the scale of each column, int32 ``[K]``."""
        _, block_cols = self.spec.granularity.block(self.nearest.shape)
        return (torch.arange(self.nearest.shape[1]) // block_cols).to(torch.int32)

    def nearest_codes(self) -> Tensor:
        """Return the codes of rounding to nearest, uint8 ``[N, K]``, one per byte."""
        codes = self.nearest.codes
        return unpack_nibbles(codes) if self.nearest.packed else codes

    def with_codes(self, codes: Tensor) -> QuantizedTensor:
        """Return the weight with the codes uint8 ``[N, K]`` that a method chose, one per byte."""
        nearest = self.nearest
        packed = pack_nibbles(codes) if nearest.packed else codes
        return QuantizedTensor(nearest.spec, nearest.shape, packed, nearest.scale, nearest.global_scale)


def error_of(weight: Tensor, quantized: QuantizedTensor) -> CastStats:
    """Return the error statistics of a quantized weight ``[N, K]``, computed in pieces of rows that fit the caches."""
    spec, scale = quantized.spec, quantized.block_scale()
    block_rows, _ = spec.granularity.block(quantized.shape)
    scales = -(-_PIECE_ROWS // block_rows)  # rows of scales per piece
    total = CastStats()
    for index in range(0, max(len(scale), 1), scales):
        rows = slice(index * block_rows, (index + scales) * block_rows)
        codes = quantized.codes[rows]
        unpacked = unpack_nibbles(codes) if quantized.packed else codes
        total += cast_stats(weight[rows].float(), unpacked, scale[index : index + scales], spec)
    return total
