"""The keys and values of latent attention: a linear that is stored as one matrix, as two weights of each head.

The stored rows of a head make its keys, then its values, of a latent. Values are rows of the matrix and keep their
format. Keys multiply queries from the other side, so their rows become columns, and a scale that a row has becomes one
of a column: E4M3 with a scale for each row, or for blocks, stays E4M3; groups along a row have no such form and become
BF16, which holds the numbers of MXFP8, MXFP4 and, beside the scale of the tensor, of NVFP4 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minifloat.kernels.pack.layout import HALF_COLS
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR, block_granularity
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor


@dataclass(frozen=True)
class HeadFormats:
    keys: WeightSpec | None
    values: WeightSpec | None
    has_factors: bool


@dataclass(frozen=True)
class HeadWeights:
    """The weights of all heads."""

    keys: Sequence[Tensor | QuantizedTensor]
    values: Sequence[Tensor | QuantizedTensor]
    factors: Tensor | None = None
    is_rounded: bool = False


def head_formats(spec: WeightSpec | None, plain: int, value_dim: int, rank: int) -> HeadFormats:
    if spec is None:
        return HeadFormats(None, None, has_factors=False)
    rows, cols = _block(spec, plain, value_dim, rank)
    values = spec if rows is None else replace(spec, granularity=block_granularity(rows, cols))
    if spec.element is not E4M3 or spec.scale not in (FLOAT32, E8M0):
        return HeadFormats(None, values, has_factors=spec.has_global_scale)
    if cols >= rank:
        return HeadFormats(WeightSpec(E4M3, TENSOR), values, has_factors=True)
    if rows is not None and (rows % HALF_COLS == 0 or rows >= plain):
        return HeadFormats(replace(spec, granularity=block_granularity(cols, rows)), values, has_factors=False)
    return HeadFormats(None, values, has_factors=False)


def _block(spec: WeightSpec, plain: int, value_dim: int, rank: int) -> tuple[int | None, int]:
    """Return the rows and columns of blocks that end where keys and values do; rows None: as they are stored."""
    rows, cols = spec.granularity.rows, spec.granularity.cols or rank
    return (None if rows in (None, 1) else math.gcd(rows or 1, plain, value_dim)), cols


def head_weights(weight: Tensor | QuantizedTensor, heads: int, plain: int, value_dim: int) -> HeadWeights:
    """Divide a matrix ``[heads * (plain + value_dim), rank]``."""
    starts = [head * (plain + value_dim) for head in range(heads)]
    if isinstance(weight, Tensor):
        parts = torch.split_with_sizes(weight, [plain, value_dim] * heads)
        return HeadWeights([part.T.contiguous() for part in parts[::2]], [part.contiguous() for part in parts[1::2]])
    formats = head_formats(weight.spec, plain, value_dim, weight.shape[1])
    values = [_rows(weight, formats.values or weight.spec, start + plain, value_dim) for start in starts]
    if formats.keys is None:
        return _keys_in_bf16(weight, starts, plain, values)
    if formats.has_factors:
        scales = _row_scales(weight)
        factors = torch.stack([scales[start : start + plain] for start in starts])
        power = _power_of_two(factors)
        keys = [_without_row_scales(weight, formats.keys, start, plain, power) for start in starts]
        return HeadWeights(keys, values, factors / power)
    rows = block_granularity(formats.keys.granularity.cols or plain, formats.keys.granularity.rows or weight.shape[1])
    cut = replace(weight.spec, granularity=rows)
    return HeadWeights([_transposed(_rows(weight, cut, start, plain), formats.keys) for start in starts], values)


def _rows(weight: QuantizedTensor, spec: WeightSpec, start: int, count: int) -> QuantizedTensor:
    """Return some rows in a format whose blocks are parts of those of the weight."""
    stored, wanted = weight.spec.granularity.rows, spec.granularity.rows
    scale = weight.scale
    if stored is not None:
        step = wanted or 1
        scale = scale[torch.arange(start, start + count, step) // stored]
    shape = (count, weight.shape[1])
    codes = weight.codes[start : start + count].contiguous()
    zero_point = weight.zero_point
    if zero_point is not None and stored is not None:
        zero_point = zero_point[torch.arange(start, start + count, wanted or 1) // stored].contiguous()
    return replace(weight, spec=spec, shape=shape, codes=codes, scale=scale.contiguous(), zero_point=zero_point)


def _row_scales(weight: QuantizedTensor) -> Tensor:
    """Return the scale of each row, float32 ``[N]``, of a weight with no more than one scale for a row."""
    rows = weight.spec.granularity.block(weight.shape)[0]
    return weight.block_scale()[:, 0].float().repeat_interleave(rows)[: weight.shape[0]]


def _power_of_two(factors: Tensor) -> float:
    """Return the power of two that the largest factor is divided by, so that factors leave queries in their range."""
    largest = factors.abs().max()
    if not largest.isfinite() or largest == 0:
        return 1.0
    return math.ldexp(1.0, int(torch.frexp(largest).exponent) - 1)


def _without_row_scales(
    weight: QuantizedTensor, spec: WeightSpec, start: int, count: int, scale: float
) -> QuantizedTensor:
    """Return some rows as columns, with one scale."""
    codes = weight.codes[start : start + count].T.contiguous()
    return QuantizedTensor(spec, (weight.shape[1], count), codes, torch.full((1, 1), scale))


def _transposed(weight: QuantizedTensor, spec: WeightSpec) -> QuantizedTensor:
    shape = (weight.shape[1], weight.shape[0])
    return replace(weight, spec=spec, shape=shape, codes=weight.codes.T.contiguous(), scale=weight.scale.T.contiguous())


def _keys_in_bf16(
    weight: QuantizedTensor, starts: Sequence[int], plain: int, values: Sequence[QuantizedTensor]
) -> HeadWeights:
    """Return keys in BF16; the scale of the tensor, if there is one, becomes a factor."""
    factors = None
    if weight.global_scale is not None:
        tensor_scale = weight.global_scale.float().reshape(())
        factor = tensor_scale.reciprocal() if weight.global_divides else tensor_scale
        factors = torch.full((len(starts), plain), float(factor))
        power = _power_of_two(factors)
        factors = factors / power
        weight = replace(weight, global_scale=torch.full_like(tensor_scale, power), global_divides=False)
    exact = weight.dequantize()
    rounded = exact.bfloat16()
    keys = [rounded[start : start + plain].T.contiguous() for start in starts]
    return HeadWeights(keys, values, factors, not torch.equal(rounded.float(), exact))
