"""Builds the decoder of the CPU, `minifloat.kernels.decoder.Decoder`, straight from a checkpoint.

`weights.py` packs each weight. A part of the decoder has the options of its layout, and for each parameter that the
layout names, the weight or the tensor.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from minifloat.engine.blueprint import Blueprint, logged_layers
from minifloat.engine.native.weights import NativeWeights, grouped
from minifloat.engine.rotary import rotary_frequencies
from minifloat.errors import MinifloatError
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
from minifloat.kernels.moe import PackedExperts
from minifloat.model.runtime.linear import Packing
from minifloat.model.runtime.tensors import KVScales
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec

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
    """Read and pack the weights of a model."""
    packed = NativeWeights(blueprint, weights, Packing(impl, torch.device("cpu"), int8_inputs=int8_inputs))
    layout, builder = blueprint.layout, LayerBuilder(packed)
    with weights.reading_ahead():
        embedding = packed.table(layout.embedding)
        inputs = builder.inputs()
        is_tied = weights.is_same_tensor(layout.embedding, layout.lm_head.weight)
        head = packed.lm_head(embedding if is_tied else None, lm_head)
        layers = tuple(
            builder.layer(layer, scales.get(f"{layout.cached_in(layer).name}.self_attn", (1.0, 1.0)))
            for layer in logged_layers(layout.layers)
        )
        norm = packed.norm(layout.norm)
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
        """Return a layer."""
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
    """Return a factor as a number of a dtype."""
    return float(torch.tensor(factor).to(dtype))
