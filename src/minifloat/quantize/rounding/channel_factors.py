"""Chooses factors for the few columns of an FP8 weight that hold most of its error, where scales are powers of two.

In most models some single weights meet inputs that are hundreds of times as large as others ("super weights", Yu et
al., arXiv 2411.07191), so that the error of one element is most of what a linear gets wrong. Under a scale amax / max
such an element is the largest of its block, and exact. Under a power of two it is off by up to half a step of the
format. A factor between two powers, folded into the column and out of what comes before, brings it back to a code.
E2M1 is left out: there it brought nothing (docs/rounding.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.numerics.formats import E4M3, E8M0
from minifloat.numerics.scheme import ScaleRule, WeightSpec
from minifloat.quantize.rounding.methods import Grid

#: Factors from ``2**-0.5`` to ``2**0.5`` that are tried; one of them is 1.
_TRIED = 16
#: Columns of a place that may get a factor, and the share of the error that one must have.
_COLUMNS, _SHARE = 8, 0.02
#: Share of the error by which a factor must lower it.
_GAIN = 0.01
#: Elements of a weight whose errors are computed at once.
_PIECE = 1 << 22


def takes_factors(spec: WeightSpec) -> bool:
    """Return whether a format is E4M3 with scales that are powers of two."""
    return spec.element is E4M3 and (spec.scale is E8M0 or spec.rule is ScaleRule.RCEIL)


def channel_factors(readers: Sequence[tuple[Tensor, WeightSpec]], energy: Tensor, norm: Tensor | None = None) -> Tensor:
    """Return the factors of channels by which the columns are multiplied, float32 ``[K]``; most are 1.

    Args:
        readers: Weights ``[N_i, K]`` that read the channels, in formats that take factors.
        energy: Mean squares of the channels, ``[K]``.
        norm: The weight ``[K]`` that is divided by the factors, if it stays in 16 or 32 bits: divided exactly.
    """
    factors = torch.ones(len(energy))
    errors = sum(_column_errors(weight, spec) for weight, spec in readers) * energy
    total = float(errors.sum())
    for column in errors.argsort(descending=True)[:_COLUMNS].tolist():
        if not float(errors[column]) > _SHARE * total:
            break
        tried = [2.0 ** (step / _TRIED - 0.5) for step in range(_TRIED)]
        if norm is not None:
            tried = [_exact(norm[column], factor) for factor in tried]
        losses = {factor: sum(_loss(reader, energy, column, factor) for reader in readers) for factor in tried}
        best = min(losses, key=losses.__getitem__)
        if losses[1.0] - losses[best] > _GAIN * total:
            factors[column] = best
    return factors


def _column_errors(weight: Tensor, spec: WeightSpec) -> Tensor:
    """Return the squared error of each column, rounded to nearest, float32 ``[K]``."""
    block = spec.granularity.block((weight.shape[0], weight.shape[1]))[0]
    errors = torch.zeros(weight.shape[1])
    for piece in torch.split(weight, block * max(_PIECE // (block * weight.shape[1]), 1)):
        errors += (Grid.of(piece, spec, None).nearest.dequantize() - piece).square_().sum(0)
    return errors


def _loss(reader: tuple[Tensor, WeightSpec], energy: Tensor, column: int, factor: float) -> float:
    """Return the error of the columns that share scales with one, if that is multiplied by a factor."""
    weight, spec = reader
    width = spec.granularity.block((weight.shape[0], weight.shape[1]))[1]
    columns = slice(column // width * width, (column // width + 1) * width)
    scale = torch.ones_like(energy[columns])
    scale[column - columns.start] = factor
    slab = weight[:, columns]
    rounded = Grid.of((slab * scale).to(weight.dtype), spec, None).nearest.dequantize() / scale
    return float(((rounded - slab).square_().sum(0) * energy[columns]).sum())


def _exact(value: Tensor, factor: float) -> float:
    """Return the factor nearest to `factor` that divides a value without an error; 1 if there is none."""
    divided = float((value.float() / factor).to(value.dtype))
    return float(value) / divided if divided else 1.0
