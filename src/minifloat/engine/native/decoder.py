"""Builds the decoder of the CPU, `minifloat.kernels.decoder.Decoder`, straight from a checkpoint.

`weights.py` packs each weight or maps it, and `layers.py` makes the decoder's parts of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minifloat.engine.blueprint import Blueprint
from minifloat.engine.loading_log import logged_layers
from minifloat.engine.native.layers import LayerBuilder, rounded
from minifloat.engine.native.mapped_weights import MappedWeights
from minifloat.engine.native.weights import NativeWeights
from minifloat.errors import MinifloatError
from minifloat.kernels import native
from minifloat.kernels.decoder import Decoder
from minifloat.model.architecture.decoder.plan import NotNative
from minifloat.model.runtime.kv_scales import KVScales
from minifloat.model.runtime.packed_cache import PackedCache, UnusableCache
from minifloat.model.runtime.packing import Packing
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec

_CPU = torch.device("cpu")


def build_native_decoder(
    blueprint: Blueprint,
    weights: WeightSource,
    scales: KVScales,
    *,
    impl: str = "auto",
    lm_head: WeightSpec | None = None,
    int8_inputs: bool = False,
    batch_invariant: bool = False,
    cache: PackedCache | None = None,
) -> Decoder:
    """Read and pack the weights of a model, or map those that were packed before."""

    def build(mapped: MappedWeights | None) -> tuple[Decoder, NativeWeights]:
        packed = NativeWeights(blueprint, weights, Packing(impl, _CPU, int8_inputs=int8_inputs), mapped)
        decoder = _build(packed, scales, lm_head, int8_inputs=int8_inputs)
        return replace(decoder, batch_invariant=batch_invariant), packed

    container = None if cache is None or native.why_unavailable() else cache.load()
    if cache is not None and container is not None:
        try:
            return build(MappedWeights(container))[0]
        except UnusableCache as error:
            cache.refuse(error)
    decoder, packed = build(None)
    if cache is not None:
        packed.keep(cache)
    return decoder


def _build(packed: NativeWeights, scales: KVScales, lm_head: WeightSpec | None, *, int8_inputs: bool) -> Decoder:
    """Build the decoder, as `build_native_decoder`."""
    blueprint, weights = packed.blueprint, packed.weights
    plan, builder = blueprint.plan, LayerBuilder(packed)
    with packed.reading():
        embedding = packed.table(plan.embedding, plan.lm_head.shape)
        inputs = builder.inputs()
        is_tied = weights.is_same_tensor(plan.embedding, plan.lm_head.weight)
        head = packed.lm_head(embedding if is_tied else None, lm_head)
        layers = tuple(
            builder.layer(layer, scales.get(f"{plan.cached_in(layer).name}.self_attn", (1.0, 1.0)))
            for layer in logged_layers(plan.layers)
        )
        norm = packed.norm(plan.norm)
    packed.warn()
    try:
        return Decoder(
            dtype=blueprint.dtype,
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=head,
            embedding_factor=embedding_factor(blueprint),
            logits_factor=plan.logits_factor,
            logits_cap=plan.logits_cap,
            int8_inputs=int8_inputs,
            inputs=inputs,
        )
    except MinifloatError as error:
        raise NotNative(str(error)) from error


def embedding_factor(blueprint: Blueprint) -> float:
    """Return what multiplies the embedding, rounded as transformers rounds it."""
    plan = blueprint.plan
    return rounded(plan.embedding_factor, blueprint.dtype if plan.rounds_embedding_factor else torch.float32)
