"""Builds the decoder of the CPU, `minifloat.kernels.decoder.Decoder`, straight from a checkpoint.

Each weight is packed as soon as it is read, in the format that it is stored in. Floats are packed as BF16 where that
holds them, else in the dtype of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from minifloat.engine.blueprint import Blueprint, logged_layers, rotary_frequencies
from minifloat.engine.latent_weights import head_weights
from minifloat.errors import MinifloatError, UsageError
from minifloat.kernels.decoder import (
    Attention,
    Decoder,
    DeltaNet,
    ExpertNorms,
    Experts,
    Latent,
    Layer,
    LayerInput,
    LayerInputs,
    Mlp,
    Norm,
    Rotary,
    Router,
)
from minifloat.kernels.decoder_layout import (
    AttentionLayout,
    DeltaLayout,
    ExpertNormsLayout,
    ExpertsLayout,
    LatentLayout,
    LayerInputLayout,
    LayerLayout,
    LinearLayout,
    MlpLayout,
    NormLayout,
    NotNative,
    RotaryLayout,
    RouterLayout,
)
from minifloat.kernels.memory import end_touching
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import Arena, FusedWeights, PackedWeight, pack
from minifloat.model.architecture.pooling import Pooling
from minifloat.model.runtime.linear import Packing, QuantizedWeight
from minifloat.model.runtime.lm_head import looked_up, quantize_lm_head
from minifloat.model.runtime.tensors import KVScales
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


class NativeWeights:
    """Packs the weights of a model, one by one."""

    def __init__(self, blueprint: Blueprint, weights: WeightSource, packing: Packing) -> None:
        self.blueprint, self.weights, self._packing = blueprint, weights, packing
        self._arena = Arena()
        self._keys_in_bf16: list[str] = []
        self._bytes_in_bf16, self._rounds_keys = 0, False

    def start_layer(self) -> None:
        self._arena = self._arena.next_layer()

    def table(self, name: str) -> Tensor:
        return self.weights.tensor(name).contiguous()

    def norm(self, layout: NormLayout) -> Norm:
        """Return a norm, in float32 after its weight was rounded to the model's dtype."""
        weight = torch.ones(layout.shape) if layout.weight is None else self.weights.tensor(layout.weight).float()
        bias = None if layout.bias is None else self.weights.tensor(layout.bias).float().contiguous()
        weight = (weight + layout.offset) * layout.factor
        return Norm(weight.flatten().contiguous(), layout.eps, bias, layout.centered)

    def lm_head(self, tied: Tensor | QuantizedTensor | None, quantize: WeightSpec | None) -> PackedWeight:
        layout = self.blueprint.layout.lm_head
        weight = self.weights.matrix(layout.weight) if tied is None else tied
        if quantize is not None and isinstance(weight, Tensor):
            weight = quantize_lm_head(weight, quantize, tied=tied is not None)
        return self._pack_stored(weight, layout.name)

    def pooling_head(self, pooling: Pooling) -> PackedWeight:
        """Return what the hidden states of a text are multiplied with where they become a vector or a score."""
        head, dtype = self.blueprint.head, self.blueprint.dtype
        if head is None:
            weight = torch.eye(self.blueprint.layout.hidden, dtype=dtype)
        elif pooling.tokens is None:
            weight = self.weights.tensor(head)
        else:
            rows, (true, false) = self.weights.tensor(head), pooling.tokens
            if max(true, false or 0) >= len(rows):
                raise UsageError(f"the tokens {pooling.tokens} of a score: the model has {len(rows)}")
            # in float32, for the rows are nearly equal
            weight = rows[true].float() - (0.0 if false is None else rows[false].float())
            weight = weight[None]
        return self._pack(weight, head or "the identity")

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
        return self._pack_stored(self.weights.matrix(layout.weight), layout.name)

    def fused(self, layouts: Sequence[LinearLayout]) -> FusedWeights:
        return grouped(FusedWeights, [self.linear(layout) for layout in layouts], layouts[0].name)

    def bias(self, layout: LinearLayout) -> Tensor | None:
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
        self._packing.pack(module, name, arena=self._arena)
        held = module.held
        return held if isinstance(held, PackedWeight) else self._pack(weight, name)

    def _pack(self, weight: Tensor | QuantizedTensor, name: str) -> PackedWeight:
        if isinstance(weight, Tensor) and torch.equal(weight.bfloat16().to(weight.dtype), weight):
            weight = weight.bfloat16()
        try:
            return pack(weight, arena=self._arena)
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
    """Return weights that are multiplied in one call; if BF16 holds some of them only, all get the others' dtype."""
    dtypes = {weight.dtype: None for weight in weights if weight.spec is None}
    if len(dtypes) > 1:
        widest = next(dtype for dtype in dtypes if dtype != torch.bfloat16)
        weights = [pack(weight.dequantize(widest)) if weight.spec is None else weight for weight in weights]
    try:
        return kind(weights)
    except MinifloatError as error:
        raise NotNative(f"{name} and those beside it: {error}") from error


_Part = TypeVar("_Part")
#: Layouts whose parts have the same fields.
_PARTS = {MlpLayout: Mlp, RouterLayout: Router, ExpertNormsLayout: ExpertNorms, LayerInputLayout: LayerInput}


def build_native_decoder(
    blueprint: Blueprint,
    weights: WeightSource,
    scales: KVScales,
    *,
    impl: str = "auto",
    lm_head: WeightSpec | None = None,
    int8_inputs: bool = False,
    batch_invariant: bool = False,
) -> Decoder:
    packed = NativeWeights(blueprint, weights, Packing(impl, torch.device("cpu"), int8_inputs=int8_inputs))
    layout, builder = blueprint.layout, LayerBuilder(packed)
    with weights.reading_ahead():
        stored = weights.matrix(layout.embedding)
        embedding = looked_up(stored, blueprint.dtype)
        inputs = builder.inputs()
        if blueprint.pooling is not None:
            head = packed.pooling_head(blueprint.pooling)
        else:
            is_tied = weights.is_same_tensor(layout.embedding, layout.lm_head.weight)
            head = packed.lm_head(stored if is_tied else None, lm_head)
        layers = tuple(
            builder.layer(layer, scales.get(f"{layout.cached_in(layer).name}.self_attn", (1.0, 1.0)))
            for layer in logged_layers(layout.layers)
        )
        norm = packed.norm(layout.norm)
    end_touching()
    packed.warn()
    try:
        return Decoder(
            dtype=blueprint.dtype,
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=head,
            embedding_factor=embedding_factor(blueprint),
            logits_factor=layout.logits_factor,
            logits_cap=layout.logits_cap,
            int8_inputs=int8_inputs,
            batch_invariant=batch_invariant,
            inputs=inputs,
        )
    except MinifloatError as error:
        raise NotNative(str(error)) from error


def embedding_factor(blueprint: Blueprint) -> float:
    """Return what multiplies the embedding, rounded as transformers rounds it."""
    layout = blueprint.layout
    return rounded(layout.embedding_factor, blueprint.dtype if layout.rounds_embedding_factor else torch.float32)


class LayerBuilder:
    """Builds the parts of a decoder in the order in which their weights are read."""

    def __init__(self, packed: NativeWeights) -> None:
        self._packed = packed
        self._rotaries: dict[RotaryLayout, Rotary] = {}

    def inputs(self) -> LayerInputs | None:
        """Return what layers read of a token besides the residual stream, or None."""
        blueprint = self._packed.blueprint
        layout = blueprint.layout.inputs
        if layout is None:
            return None
        factor = rounded(layout.table_factor, blueprint.dtype)
        return self._part(LayerInputs, layout, table=self._packed.table(layout.table), table_factor=factor)

    def layer(self, layout: LayerLayout, kv_scales: tuple[float, float]) -> Layer:
        self._packed.start_layer()
        before = {name: self._read(getattr(layout, name)) for name in ("input_norm", "attention_norm")}
        if isinstance(layout.attention, DeltaLayout):
            before["attention"] = self._delta(layout.attention)
        else:
            before["attention"] = self._attention(layout.attention, kv_scales)
        after = {name: self._read(getattr(layout, name)) for name in ("mlp_norm", "result_norm", "mlp", "input")}
        scalar = 1.0 if layout.scalar is None else float(self._packed.weights.tensor(layout.scalar))
        return self._part(Layer, layout, **before, **after, scalar=scalar)

    def _part(self, kind: type[_Part], layout: Any, **given: Any) -> _Part:
        """Return a part whose fields are `given`, or the options and parameters of the same names in its layout."""
        options = {name for base in kind.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
        for field in fields(kind):  # type: ignore[arg-type]
            name = field.name
            if name in given:
                continue
            if name in options:
                given[name] = getattr(layout, name)
            elif name.endswith("_bias") and not hasattr(layout, name):
                linears = getattr(layout, name.removesuffix("_bias"))
                single = isinstance(linears, LinearLayout)
                given[name] = self._packed.bias(linears) if single else self._packed.biases(linears)
            else:
                given[name] = self._read(getattr(layout, name))
        return kind(**given)

    def _read(self, layout: Any) -> Any:
        """Return what a layout describes; a name is that of a parameter, which becomes float32."""
        if isinstance(layout, str):
            return self._packed.vector(layout)
        if isinstance(layout, tuple):
            return self._packed.fused(layout)
        if isinstance(layout, LinearLayout):
            return self._packed.linear(layout)
        if isinstance(layout, NormLayout):
            return self._packed.norm(layout)
        if isinstance(layout, RotaryLayout):
            if layout not in self._rotaries:
                self._rotaries[layout] = Rotary(*rotary_frequencies(layout), interleaved=layout.interleaved)
            return self._rotaries[layout]
        if isinstance(layout, ExpertsLayout):
            return self._experts(layout)
        return self._part(_PARTS[type(layout)], layout) if type(layout) in _PARTS else layout

    def _delta(self, layout: DeltaLayout) -> DeltaNet:
        weights = self._packed.weights
        return self._part(
            DeltaNet,
            layout,
            conv=weights.tensor(layout.conv).float()[:, 0].T.contiguous(),
            decay=weights.tensor(layout.decay).float().exp(),
        )

    def _attention(self, layout: AttentionLayout, kv_scales: tuple[float, float]) -> Attention:
        latent = None if layout.latent is None else self._latent(layout.latent, layout.heads)
        return self._part(Attention, layout, latent=latent, k_scale=kv_scales[0], v_scale=kv_scales[1])

    def _latent(self, layout: LatentLayout, heads: int) -> Latent:
        keys, values, factors = self._packed.latent_heads(layout, heads)
        return self._part(
            Latent,
            layout,
            keys=grouped(PackedExperts, keys, layout.up.name),
            values=grouped(PackedExperts, values, layout.up.name),
            key_factors=factors,
        )

    def _experts(self, layout: ExpertsLayout) -> Experts:
        gate_up = self._packed.stacks(layout.gate_up, layout.interleaved)
        shared_gate = self._packed.vector(layout.shared_gate)
        down_bias = None if layout.down_bias is None else self._packed.weights.tensor(layout.down_bias).contiguous()
        return self._part(
            Experts,
            layout,
            gate_up=gate_up,
            down=self._packed.stacks(layout.down)[0],
            gate_up_bias=self._gate_up_biases(layout, len(gate_up)),
            down_bias=down_bias,
            shared_gate=None if shared_gate is None else shared_gate.flatten(),
        )

    def _gate_up_biases(self, layout: ExpertsLayout, stacks: int) -> tuple[Tensor, ...] | None:
        if layout.gate_up_bias is None:
            return None
        biases = self._packed.weights.tensor(layout.gate_up_bias)
        if layout.interleaved:
            biases = torch.cat([biases[:, ::2], biases[:, 1::2]], dim=1)
        return tuple(part.contiguous() for part in biases.chunk(stacks, dim=1))


def rounded(factor: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(factor).to(dtype))
