"""Builds the decoder of the CPU, `minifloat.kernels.decoder.Decoder`, straight from a checkpoint.

`weights.py` packs each weight, and `layers.py` makes the decoder's parts of them.
"""

from __future__ import annotations

import torch

from minifloat.engine.blueprint import Blueprint, logged_layers
from minifloat.engine.native.layers import LayerBuilder, rounded
from minifloat.engine.native.weights import NativeWeights
from minifloat.errors import MinifloatError
from minifloat.kernels.decoder import Decoder
from minifloat.kernels.decoder_layout import NotNative
from minifloat.model.runtime.kv_scales import KVScales
from minifloat.model.runtime.packing import Packing
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.scheme import WeightSpec


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
