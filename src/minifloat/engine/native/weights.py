"""`NativeWeights`: the weights of a model in the form that the kernels of the CPU multiply with.

Each weight is packed as soon as it is read, in the format that it is stored in, or as BF16; or it is mapped from a file
of packed weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from minifloat.engine.blueprint import Blueprint
from minifloat.engine.native.latent_weights import head_formats, head_weights
from minifloat.engine.native.mapped_weights import MappedWeights, contents
from minifloat.errors import MinifloatError
from minifloat.kernels.decoder import Norm
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack
from minifloat.model.architecture.decoder.plan import LatentPlan, LinearPlan, NormPlan, NotNative
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import quantize_lm_head
from minifloat.model.runtime.packed_cache import PackedCache
from minifloat.model.runtime.packing import Packing
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


class NativeWeights:
    """Packs the weights of a model, one by one, or takes them from a file of packed weights."""

    def __init__(
        self, blueprint: Blueprint, weights: WeightSource, packing: Packing, mapped: MappedWeights | None
    ) -> None:
        self.blueprint, self.weights = blueprint, weights
        self._packing, self._mapped = packing, mapped
        self._made: dict[str, PackedWeight | Tensor] = {}
        self._keys_in_bf16: list[str] = []
        self._bytes_in_bf16, self._rounds_keys = 0, False

    def reading(self) -> AbstractContextManager[None]:
        """Read weights ahead, if they are read at all."""
        return self.weights.reading_ahead() if self._mapped is None else nullcontext()

    def keep(self, cache: PackedCache) -> None:
        """Write what was packed to a cache, unless the log would have to say more about it at every start."""
        if self._packing.packs_all and not self.weights.dequantized:
            cache.store({name: contents(made) for name, made in self._made.items()})
        else:
            _LOG.warning("the packed weights are not kept: the kernels do not multiply all of them as they are stored")

    def table(self, name: str, shape: tuple[int, int]) -> Tensor:
        """Return an embedding ``[vocab, size]``."""
        if self._mapped is not None:
            return self._mapped.tensor(name, shape, self.blueprint.dtype)
        table = self.weights.tensor(name).contiguous()
        self._made[name] = table
        return table

    def norm(self, plan: NormPlan) -> Norm:
        """Return a norm, in float32 after its weight was rounded to the model's dtype."""
        weight = torch.ones(plan.shape) if plan.weight is None else self.weights.tensor(plan.weight).float()
        bias = None if plan.bias is None else self.weights.tensor(plan.bias).float().contiguous()
        weight = (weight + plan.offset) * plan.factor
        return Norm(weight.flatten().contiguous(), plan.eps, bias, plan.centered)

    def norm_or_none(self, plan: NormPlan | None) -> Norm | None:
        """Return a norm, or None where there is none."""
        return None if plan is None else self.norm(plan)

    def lm_head(self, tied: Tensor | None, quantize: WeightSpec | None) -> PackedWeight:
        """Return the last linear."""
        plan = self.blueprint.plan.lm_head
        spec = None if tied is not None else self.weights.spec(plan.weight)

        def make() -> PackedWeight:
            weight = self.weights.matrix(plan.weight) if tied is None else tied
            if quantize is not None and isinstance(weight, Tensor):
                weight = quantize_lm_head(weight, quantize, tied=tied is not None)
            return self._pack_stored(weight, plan.name)

        return self._packed(plan.name, spec or quantize, plan.shape, make)

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

    def linear(self, plan: LinearPlan) -> PackedWeight:
        """Return the weight of a linear."""

        def make() -> PackedWeight:
            return self._pack_stored(self.weights.matrix(plan.weight), plan.name)

        return self._packed(plan.name, self.weights.spec(plan.weight), plan.shape, make)

    def fused(self, plans: Sequence[LinearPlan]) -> FusedWeights:
        """Return the weights of linears with the same input."""
        return grouped(FusedWeights, [self.linear(plan) for plan in plans], plans[0].name)

    def bias(self, plan: LinearPlan) -> Tensor | None:
        """Return the bias of a linear ``[N]``, or None."""
        return None if plan.bias is None else self.weights.tensor(plan.bias).contiguous()

    def biases(self, plans: Sequence[LinearPlan]) -> tuple[Tensor | None, ...] | None:
        """Return the biases of linears, or None if all have none."""
        biases = tuple(self.bias(plan) for plan in plans)
        return None if all(bias is None for bias in biases) else biases

    def vector(self, name: str | None) -> Tensor | None:
        """Return a parameter in float32, or None where there is none."""
        return None if name is None else self.weights.tensor(name).float().contiguous()

    def stacks(self, fused: str, interleaved: bool = False) -> tuple[PackedExperts, ...]:
        """Return the weights of all experts: one stack, or one for each of the parts that they are stored in."""
        if self._mapped is not None:
            experts = [
                [
                    self._mapped_weight(self._mapped, f"{fused}.{expert}.{part}", spec, shape, fused)
                    for part, (spec, shape) in enumerate(parts)
                ]
                for expert, parts in enumerate(self.weights.expert_specs(fused))
            ]
        else:
            experts = [
                [self._pack_stored(_gate_first(matrix) if interleaved else matrix, fused) for matrix in matrices]
                for matrices in self.weights.experts(fused)
            ]
            self._made |= {
                f"{fused}.{expert}.{part}": weight
                for expert, parts in enumerate(experts)
                for part, weight in enumerate(parts)
            }
        return tuple(grouped(PackedExperts, list(column), fused) for column in zip(*experts, strict=True))

    def latent_heads(
        self, plan: LatentPlan, heads: int
    ) -> tuple[list[PackedWeight], list[PackedWeight], Tensor | None]:
        """Return the keys and values of each head, and the factors of queries."""
        name, (_, rank) = plan.up.name, plan.up.shape
        formats = head_formats(self.weights.spec(plan.up.weight), plan.plain, plan.value_dim, rank)
        factors_name = f"{name}.factors"
        if self._mapped is not None:
            parts = {"keys": (formats.keys, (rank, plan.plain)), "values": (formats.values, (plan.value_dim, rank))}
            keys, values = (
                [self._mapped_weight(self._mapped, f"{name}.{part}.{head}", *kind, name) for head in range(heads)]
                for part, kind in parts.items()
            )
            shape = (heads, plan.plain)
            factors = self._mapped.tensor(factors_name, shape, torch.float32) if formats.has_factors else None
            return keys, values, factors
        divided = head_weights(self.weights.matrix(plan.up.weight), heads, plan.plain, plan.value_dim)
        keys, values = (
            [self._pack_stored(weight, name) for weight in weights] for weights in (divided.keys, divided.values)
        )
        if self.weights.is_quantized(plan.up.weight) and formats.keys is None:
            self._keys_in_bf16.append(name)
            self._bytes_in_bf16 += sum(weight.nbytes for weight in keys)
            self._rounds_keys |= divided.is_rounded
        self._made |= {f"{name}.keys.{head}": weight for head, weight in enumerate(keys)}
        self._made |= {f"{name}.values.{head}": weight for head, weight in enumerate(values)}
        if divided.factors is not None:
            self._made[factors_name] = divided.factors
        return keys, values, divided.factors

    def _packed(
        self, name: str, spec: WeightSpec | None, shape: tuple[int, int], make: Callable[[], PackedWeight]
    ) -> PackedWeight:
        """Return a weight from the file of packed weights, or make it."""
        if self._mapped is not None:
            return self._mapped_weight(self._mapped, name, spec, shape, name)
        weight = make()
        self._made[name] = weight
        return weight

    def _mapped_weight(
        self, mapped: MappedWeights, name: str, spec: WeightSpec | None, shape: tuple[int, int], module: str
    ) -> PackedWeight:
        weight = mapped.weight(name, spec, shape)
        if spec is not None:
            self._packing.count(weight, module)
        return weight

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
