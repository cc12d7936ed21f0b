"""`NativeWeights`: the weights of a model in the form that the kernels of the CPU multiply with.

Each weight is packed as soon as it is read, in the format that it is stored in, or as BF16.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from minifloat.engine.blueprint import Blueprint
from minifloat.engine.native.latent_weights import head_weights
from minifloat.errors import MinifloatError
from minifloat.kernels.decoder import Norm
from minifloat.kernels.decoder_layout import LatentLayout, LinearLayout, NormLayout, NotNative
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack
from minifloat.model.runtime.linear import Packing, QuantizedWeight
from minifloat.model.runtime.lm_head import quantize_lm_head
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


class NativeWeights:
    """Packs the weights of a model, one by one."""

    def __init__(self, blueprint: Blueprint, weights: WeightSource, packing: Packing) -> None:
        self.blueprint, self.weights, self._packing = blueprint, weights, packing
        self._keys_in_bf16: list[str] = []
        self._bytes_in_bf16, self._rounds_keys = 0, False

    def table(self, name: str) -> Tensor:
        """Return an embedding ``[vocab, size]``."""
        return self.weights.tensor(name).contiguous()

    def norm(self, layout: NormLayout) -> Norm:
        """Return a norm, in float32 after its weight was rounded to the model's dtype."""
        weight = torch.ones(layout.shape) if layout.weight is None else self.weights.tensor(layout.weight).float()
        bias = None if layout.bias is None else self.weights.tensor(layout.bias).float().contiguous()
        weight = (weight + layout.offset) * layout.factor
        return Norm(weight.flatten().contiguous(), layout.eps, bias, layout.centered)

    def norm_or_none(self, layout: NormLayout | None) -> Norm | None:
        """Return a norm, or None where there is none."""
        return None if layout is None else self.norm(layout)

    def lm_head(self, tied: Tensor | None, quantize: WeightSpec | None) -> PackedWeight:
        """Return the last linear."""
        layout = self.blueprint.layout.lm_head
        weight = self.weights.matrix(layout.weight) if tied is None else tied
        if quantize is not None and isinstance(weight, Tensor):
            weight = quantize_lm_head(weight, quantize, tied=tied is not None)
        return self._pack_stored(weight, layout.name)

    def warn(self) -> None:
        """Log the weights that have no packed form, and those that had to be dequantized."""
        self.weights.warn()
        self._packing.warn()
        if self._keys_in_bf16:
            _LOG.log(
                logging.WARNING if self._rounds_keys else logging.INFO,
                "the keys of %d layers of latent attention are multiplied in BF16, %s, in %.1f MB",
                len(self._keys_in_bf16),
                "to which they are rounded" if self._rounds_keys else "which holds them exactly",
                self._bytes_in_bf16 / 1e6,
            )

    def linear(self, layout: LinearLayout) -> PackedWeight:
        """Return the weight of a linear."""
        return self._pack_stored(self.weights.matrix(layout.weight), layout.name)

    def fused(self, layouts: Sequence[LinearLayout]) -> FusedWeights:
        """Return the weights of linears with the same input."""
        return grouped(FusedWeights, [self.linear(layout) for layout in layouts], layouts[0].name)

    def bias(self, layout: LinearLayout) -> Tensor | None:
        """Return the bias of a linear ``[N]``, or None."""
        return None if layout.bias is None else self.weights.tensor(layout.bias).contiguous()

    def biases(self, layouts: Sequence[LinearLayout]) -> tuple[Tensor | None, ...] | None:
        """Return the biases of linears, or None if all have none."""
        biases = tuple(self.bias(layout) for layout in layouts)
        return None if all(bias is None for bias in biases) else biases

    def vector(self, name: str | None) -> Tensor | None:
        """Return a parameter in float32, or None where there is none."""
        return None if name is None else self.weights.tensor(name).float().contiguous()

    def stacks(self, fused: str, interleaved: bool = False) -> tuple[PackedExperts, ...]:
        """Return the weights of all experts: one stack, or one for each of the parts that they are stored in."""
        experts = [
            [self._pack_stored(_gate_first(matrix) if interleaved else matrix, fused) for matrix in matrices]
            for matrices in self.weights.experts(fused)
        ]
        return tuple(grouped(PackedExperts, list(column), fused) for column in zip(*experts, strict=True))

    def latent_heads(
        self, layout: LatentLayout, heads: int
    ) -> tuple[list[PackedWeight], list[PackedWeight], Tensor | None]:
        """Return the keys and values of each head, and the factors of queries."""
        name = layout.up.name
        divided = head_weights(self.weights.matrix(layout.up.weight), heads, layout.plain, layout.value_dim)
        keys, values = (
            [self._pack_stored(weight, name) for weight in weights] for weights in (divided.keys, divided.values)
        )
        if self.weights.is_quantized(layout.up.weight) and isinstance(divided.keys[0], Tensor):
            self._keys_in_bf16.append(name)
            self._bytes_in_bf16 += sum(weight.nbytes for weight in keys)
            self._rounds_keys |= divided.is_rounded
        return keys, values, divided.factors

    def _pack_stored(self, weight: Tensor | QuantizedTensor, name: str) -> PackedWeight:
        """Pack a weight, and note one that the kernels of this machine do not multiply."""
        if isinstance(weight, Tensor):
            return self._pack(weight, name)
        module = QuantizedWeight(weight, self.blueprint.dtype)
        self._packing.pack(module, name)
        held = module.held
        return held if isinstance(held, PackedWeight) else self._pack(weight, name)

    def _pack(self, weight: Tensor | QuantizedTensor, name: str) -> PackedWeight:
        if isinstance(weight, Tensor) and weight.dtype != torch.bfloat16:
            rounded = weight.bfloat16()
            if not torch.equal(rounded.to(weight.dtype), weight):
                raise NotNative(f"{name} is {weight.dtype} and BF16, which the kernels multiply, does not hold it")
            weight = rounded
        try:
            return pack(weight)
        except MinifloatError as error:
            raise NotNative(f"{name}: {error}") from error


def _gate_first(matrix: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
    """Put the even rows of a matrix before the odd ones."""
    if isinstance(matrix, Tensor):
        return torch.cat([matrix[::2], matrix[1::2]])
    if matrix.scale.shape[0] != matrix.shape[0]:
        raise NotNative(f"rows of gate and up alternate, and share scales ({matrix.spec.granularity})")
    order = torch.cat([torch.arange(0, matrix.shape[0], 2), torch.arange(1, matrix.shape[0], 2)])
    return replace(matrix, codes=matrix.codes[order], scale=matrix.scale[order])


def grouped(kind: type[_Weights], weights: list[PackedWeight], name: str) -> _Weights:
    """Put weights together that one call multiplies with."""
    try:
        return kind(weights)
    except MinifloatError as error:
        raise NotNative(f"{name} and those beside it: {error}") from error
