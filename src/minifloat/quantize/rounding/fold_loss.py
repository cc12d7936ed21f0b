"""The error that rounding to nearest leaves in the outputs of the linears of one site, for given folded scales.

The loss only ranks candidates, so it is computed on at most `MAX_ROWS` rows of the weights, in whole blocks spread
evenly over them. Without quantized inputs it is ``tr(E H E')`` or ``||X E'||^2``, whichever takes fewer products; E is
the error of the weight. With quantized inputs it is ``||Xq Wq' - X W'||^2``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.kernels.quantize import quantize_rows
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import amax, float_scales, global_divisor
from minifloat.numerics.scheme import ActivationSpec, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

#: Rows of all weights of a site on which the loss is computed, rounded up to one block.
MAX_ROWS = 512
#: Expected number of calls of `OutputLoss.total`, by which the cheaper way of computing it is picked.
CANDIDATES = 5


class OutputLoss:
    """Squared error of the outputs of one site's linears."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        spec: WeightSpec,
        inputs: Tensor,
        activation: ActivationSpec | None,
        shares: Sequence[int] | None,
    ) -> None:
        self.spec, self.inputs, self.activation = spec, inputs, activation
        groups = [0] * len(weights) if shares is None else list(shares)
        self._slabs = [(groups[i], slab) for i, slab in _sample_rows(weights, spec)]
        self._column_amax = _column_amax(weights, groups) if spec.needs_tensor_amax else {}
        tokens, channels = inputs.shape
        rows = sum(slab.shape[0] for _, slab in self._slabs)
        by_gram, by_tokens = channels * (tokens + CANDIDATES * rows), 2 * CANDIDATES * tokens * rows
        self.uses_gram = activation is None and by_gram < by_tokens
        self._gram = inputs.T @ inputs if self.uses_gram else None

    def total(self, exponents: Tensor) -> float:
        """Return the loss on the inputs for int32 ``[K]`` exponents, summed over tokens and sampled rows."""
        if self._gram is None:
            return float(self.per_token(self.inputs, exponents)[0].sum())
        errors = (self._folded(group, slab, exponents) - slab for group, slab in self._slabs)
        return sum(float(((error @ self._gram) * error).sum(dtype=torch.float64)) for error in errors)

    def per_token(self, inputs: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and the squared norm of its outputs, float64 ``[T]`` each."""
        loss = torch.zeros(inputs.shape[0], dtype=torch.float64)
        norm = torch.zeros_like(loss)
        seen = inputs if self.activation is None else self._rounded_inputs(inputs, exponents)
        for group, slab in self._slabs:
            outputs = inputs @ slab.T
            rounded = seen @ self._folded(group, slab, exponents).T
            loss += (rounded - outputs).square().sum(1)
            norm += outputs.square().sum(1)
        return loss, norm

    def _folded(self, group: int, slab: Tensor, exponents: Tensor) -> Tensor:
        """Return a slab rounded to nearest with its columns scaled, and scaled back."""
        scale = powers_of_two(exponents)
        tensor_amax = (self._column_amax[group] * scale).amax() if self._column_amax else None
        return round_to_nearest(slab * scale, self.spec, tensor_amax).div_(scale)

    def _rounded_inputs(self, inputs: Tensor, exponents: Tensor) -> Tensor:
        """Return inputs divided by the scales, quantized, and multiplied back."""
        assert self.activation is not None
        scale = powers_of_two(exponents)
        static = self._static_scale(amax(self.inputs / scale, TENSOR)) if self.activation.needs_calibration else None
        codes, grid = quantize_activation(inputs / scale, self.activation, static)
        return dequantize_activation(codes, grid, self.activation).mul_(scale)

    def _static_scale(self, inputs_amax: Tensor) -> Tensor:
        """Return the static scale, or NVFP4's divisor, of inputs with this amax."""
        assert self.activation is not None
        if self.activation.has_global_scale:
            return global_divisor(inputs_amax)
        return float_scales(inputs_amax, self.activation.element)


def round_to_nearest(weight: Tensor, spec: WeightSpec, tensor_amax: Tensor | None = None) -> Tensor:
    """Return the dequantized values of a weight that the streaming quantizer would write."""
    rows, cols = weight.shape
    if spec.needs_tensor_amax and tensor_amax is None:
        tensor_amax = weight.abs().amax()
    data = weight.contiguous().view(-1).view(torch.uint8).numpy()
    limit = None if tensor_amax is None or not spec.needs_tensor_amax else float(tensor_amax)
    quantized = quantize_rows(data, "F32", (rows, cols), spec, tensor_amax=limit)
    divisor = global_divisor(torch.tensor(limit)) if spec.has_global_scale else None
    codes, scales = torch.from_numpy(quantized.codes), torch.from_numpy(quantized.scales)
    return QuantizedTensor(spec, (rows, cols), codes, scales, divisor).dequantize()


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return ``2**exponents`` as float32, exact, for int32 exponents of normal numbers."""
    return ((exponents + FLOAT32.bias) << FLOAT32.mantissa_bits).view(torch.float32)


def _sample_rows(weights: Sequence[Tensor], spec: WeightSpec) -> list[tuple[int, Tensor]]:
    """Return sampled rows of the weights, each with the index of its weight."""
    block = spec.granularity.rows or 1
    starts = [(i, start) for i, weight in enumerate(weights) for start in range(0, weight.shape[0], block)]
    count = min(len(starts), max(1, MAX_ROWS // block))
    picked: dict[int, list[int]] = {}
    for k in range(count):
        i, start = starts[k * len(starts) // count]
        picked.setdefault(i, []).extend(range(start, min(start + block, weights[i].shape[0])))
    return [(i, weights[i][torch.tensor(rows)].float()) for i, rows in picked.items()]


def _column_amax(weights: Sequence[Tensor], groups: Sequence[int]) -> dict[int, Tensor]:
    """Return the largest magnitude of each column, float32 ``[K]``, over the weights of each group."""
    found: dict[int, Tensor] = {}
    for group, weight in zip(groups, weights, strict=True):
        columns = weight.abs().amax(0).float()
        found[group] = torch.maximum(found[group], columns) if group in found else columns
    return found
