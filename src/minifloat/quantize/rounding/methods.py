"""The methods that choose the codes of weights, and their table.

GPTQ compensates the error of each column by the columns that are rounded after it.

Source: Frantar et al., GPTQ (arXiv 2210.17323); the form without an inverse: `minifloat.quantize.rounding.feedback`.
The output target is that of GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from minifloat.errors import lookup
from minifloat.kernels.quantize import quantize_rows
from minifloat.kernels.rounding import round_with_feedback
from minifloat.numerics.cast import pack_nibbles, unpack_nibbles
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.scale import cast_stats
from minifloat.numerics.scale_rules import search_nvfp4_scales
from minifloat.numerics.scheme import ScaleRule, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.feedback import DAMPING, Feedback, factorize, factorize_rows, regress, times
from minifloat.quantize.rounding.statistics import Rows, Statistics, output_error

#: Tokens per column at which half of an estimate counts, where no held-out text says how much of it is right.
TOKENS_PER_COLUMN = 4
#: The regression of the drift adds the mean diagonal of H times this and the columns per token, which is what the noise
#: of the estimate grows with: directions of X with little variance hold little of the drift, and what is fitted there
#: from one text is wrong for another.
RIDGE = 16.0
#: Rows of a weight whose errors are computed at once.
_PIECE_ROWS = 128
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Grid:
    """A weight rounded to nearest; a method may choose other codes, and other scales where they are searched."""

    nearest: QuantizedTensor
    outputs: Tensor | None = None  # second moments of the gradients of the outputs (`output_moments`)

    @classmethod
    def of(cls, weight: Tensor, spec: WeightSpec, group_amax: float | None, outputs: Tensor | None = None) -> Grid:
        rows, cols = weight.shape
        data = weight.contiguous().reshape(-1).view(torch.uint8).numpy()
        cast = quantize_rows(data, _NAMES[weight.dtype], (rows, cols), spec, tensor_amax=group_amax)
        scale = torch.from_numpy(cast.scales)
        divisor = None
        if spec.has_global_scale:
            divisor = torch.tensor(scalar_global_divisor(group_amax or 0.0))
        return cls(QuantizedTensor(spec, (rows, cols), torch.from_numpy(cast.codes), scale, divisor), outputs)

    @property
    def spec(self) -> WeightSpec:
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

    def fitted(self, target: Tensor, feedback: Feedback) -> Grid:
        """Return the grid with the scales that round a target float32 ``[N, K]`` with the least error.

        Errors of columns count as feedback counts them: by the diagonal of D. Only E4M3 scales that are searched
        change: powers of two are too coarse, a smaller one saturates what feedback adds (docs/rounding.md).
        """
        spec, nearest = self.spec, self.nearest
        if spec.rule is not ScaleRule.SEARCH or nearest.global_scale is None:
            return self
        importance = torch.empty(len(feedback.scale))
        importance[feedback.order] = (feedback.scale / feedback.scale.mean()).float()
        found = [
            search_nvfp4_scales(piece, spec.granularity, nearest.global_scale, importance)
            for piece in torch.split(target, _PIECE_ROWS)
        ]
        return replace(self, nearest=replace(nearest, scale=torch.cat(found)))

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


@dataclass(frozen=True)
class SharedInput:
    """What is known about the input that some linears share."""

    statistics: Statistics
    held_out: Rows | None = None  # float32 rows of text that is in no statistic; None: there are none
    name: str = "weight"  # of one of the modules, for errors

    @cached_property
    def feedback(self) -> Feedback:
        return factorize(self.statistics.hessian, self.name)


@dataclass(frozen=True)
class Rounded:
    """What a method made of weights."""

    weights: list[QuantizedTensor]
    details: dict[str, float] = field(default_factory=dict)


class Method(ABC):
    """Chooses the codes of weights that share their input.

    Attributes:
        name: Name on the command line.
        summary: One line for `--help` and reports.
        needs_data: Whether it chooses codes with the inputs of the weights.
        follows_quantized: Whether the inputs are those that the layers quantized before give, beside the original ones.
        weighs_outputs: Whether the errors of outputs cancel where the loss of the original model depends on them.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_data: ClassVar[bool] = True
    follows_quantized: ClassVar[bool] = False
    weighs_outputs: ClassVar[bool] = False

    @abstractmethod
    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: SharedInput) -> Rounded:
        """Return each weight with the codes that are chosen.

        Args:
            weights: The original weights, float32 ``[N_i, K]``.
            grids: Scales of each weight; all of one storage format.
            inputs: Of these weights.
        """


class Nearest(Method):
    """Rounding to nearest: each element takes the code closest to it, whatever the inputs are."""

    name = "nearest"
    summary = "each weight to its nearest code; needs no data"
    needs_data = False

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: SharedInput) -> Rounded:
        return Rounded([grid.nearest for grid in grids])


class Gptq(Method):
    """GPTQ with static scales, columns ordered by the diagonal of the Hessian."""

    name = "gptq"
    summary = "error compensation under the inputs of the original model (GPTQ)"

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: SharedInput) -> Rounded:
        return Rounded(compensate(torch.cat(list(weights)), grids, inputs.feedback))


def compensate(target: Tensor, grids: Sequence[Grid], feedback: Feedback) -> list[QuantizedTensor]:
    """Round weights column by column with feedback, and row by row in blocks where moments of outputs are known."""
    found, first = [], 0
    for grid in grids:
        rows = grid.nearest.shape[0]
        found.append(grid.with_codes(_compensate_one(target[first : first + rows], grid, feedback)))
        first += rows
    return found


def _compensate_one(target: Tensor, grid: Grid, feedback: Feedback) -> Tensor:
    columns, groups = feedback.order, grid.column_groups()[feedback.order]
    rows, between_rows = torch.arange(len(target)), None
    if grid.outputs is not None:
        between = factorize_rows(grid.outputs, len(target))
        rows, between_rows = between.order, between.matrix
    ordered, scales = target[rows[:, None], columns], grid.row_scales()[rows]
    rounded = round_with_feedback(ordered, scales, groups, feedback.matrix, grid.spec.element, between_rows)
    codes = torch.empty_like(rounded)
    codes[rows[:, None], columns] = rounded
    return codes


class Match(Method):
    """GPTQ whose target gives the original outputs on the inputs of the quantized model (output matching).

    The layers before a linear are quantized already, so that its inputs X differ from the inputs Xf of the original
    model. The weight W' = W + W (Xf - X)'X (X'X + l I)^-1, gives on X outputs that are closer to W Xf (l: `ridge`).
    GPTQ then rounds W' instead of W. A linear that adds to the residual stream also makes up for half of the error that
    the stream has by then: that half is added to W (Xf - X).

    W' - W is an estimate from a finite text and would do harm if that is short, so it is multiplied by the factor that
    is best on held-out text, which is near 1 if there are many tokens for each of the K columns and falls towards 0 if
    there are few.
    """

    name = "match"
    summary = "error compensation that matches the outputs of the original layers, layer by layer"
    follows_quantized = True
    weighs_outputs = True

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: SharedInput) -> Rounded:
        target, details = matched(torch.cat(list(weights)), inputs)
        parts = torch.split(target, [len(weight) for weight in weights])
        fitted = [grid.fitted(part, inputs.feedback) for grid, part in zip(grids, parts, strict=True)]
        return Rounded(compensate(target, fitted, inputs.feedback), details)


def matched(weight: Tensor, inputs: SharedInput) -> tuple[Tensor, dict[str, float]]:
    """Return the weight whose outputs on X match the original outputs on Xf, and the factor of its change."""
    statistics, held_out = inputs.statistics, inputs.held_out
    lacking = statistics.output_drift
    if statistics.drift is not None:
        lacking = times(weight, statistics.drift)
    if lacking is None:
        return weight, {}
    step = regress(lacking, factorize(statistics.hessian, inputs.name, ridge(statistics)))
    error = None if held_out is None else output_error(held_out, weight, lambda x, w: times(x, w.T.contiguous()))
    factor = _factor(step, error, held_out, statistics.tokens)
    return weight + factor * step, {"drift_factor": factor}


def ridge(statistics: Statistics) -> float:
    """Return the share of the mean diagonal of H that is added in the regression of the drift."""
    return max(RIDGE * len(statistics.hessian) / max(statistics.tokens, 1), DAMPING)


def _factor(step: Tensor, error: Tensor | None, held_out: Rows | None, tokens: int) -> float:
    """Return the factor from 0 to 1 of a change of the weight that removes most of an error of outputs."""
    if error is None or held_out is None:
        columns = step.shape[1]
        return tokens / (tokens + TOKENS_PER_COLUMN * columns)
    change = times(held_out.inputs, step.T.contiguous())
    energy = float(change.square().sum())
    return min(max(float((error * change).sum()) / energy, 0.0), 1.0) if energy > 0 else 0.0


METHODS: dict[str, Method] = {method.name: method for method in (Nearest(), Gptq(), Match())}


def get_method(name: str) -> Method:
    """Return the method `name`.

    Raises:
        UnknownNameError: If there is no such method; the message lists the valid names.
    """
    return lookup("method", name, METHODS)


DEFAULT_METHOD = "match"


@dataclass(frozen=True)
class RoundingOptions:
    """How codes are chosen with data.

    Attributes:
        method: Chooses the codes of each stage.
        fold: Whether to fold scales of input channels into the tensors before, where that lowers the error.
        kv_cache: Whether to record the ranges of keys and values, for the scales of an FP8 KV cache.
        max_memory: Bytes of weights that may be in memory at a time; None: no limit beyond one layer.
        device: Where layers run and statistics are computed.
    """

    method: Method = METHODS[DEFAULT_METHOD]
    fold: bool = True
    kv_cache: bool = False
    max_memory: int | None = None
    device: str | torch.device = "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Return what determines the result, as JSON values."""
        return {"method": self.method.name, "fold": self.fold, "kv_cache": self.kv_cache}


DEFAULT_ROUNDING = RoundingOptions()
