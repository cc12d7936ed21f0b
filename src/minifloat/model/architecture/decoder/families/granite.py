"""Granite and its mixtures: factors of the embedding, the attention, the results of layers and the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import DecoderLayout, ExpertsLayout, LayerLayout, MlpLayout, RouterLayout
from minifloat.model.architecture.decoder import parts


def granite(config: Any) -> DecoderLayout:
    def mlp(config: Any, index: int) -> MlpLayout:
        name, bias = f"{parts.layer_name(index)}.mlp", bool(config.mlp_bias)
        return parts.mlp(config, name, int(config.intermediate_size), bias=bias)

    return _decoder(config, mlp)


def granite_moe(config: Any) -> DecoderLayout:
    """Return the layout of a Granite mixture: softmax over the chosen experts, and in some an MLP beside them."""
    layout = _decoder(config, _experts)
    renamings = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
    return replace(layout, renamings=renamings)


def _experts(config: Any, index: int) -> ExpertsLayout:
    name = f"{parts.layer_name(index)}.block_sparse_moe"
    router = RouterLayout(f"{name}.router.weight", top_k=int(config.num_experts_per_tok), kind="softmax_of_chosen")
    layout = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    shared = int(getattr(config, "shared_intermediate_size", 0))
    if not shared:
        return layout
    names = ("input_linear", "output_linear")
    return replace(layout, shared=parts.fused_mlp(config, f"{parts.layer_name(index)}.shared_mlp", shared, names))


def _decoder(config: Any, mlp: Callable[[Any, int], MlpLayout | ExpertsLayout]) -> DecoderLayout:
    def layer(config: Any, index: int) -> LayerLayout:
        bias = bool(config.attention_bias)
        attention = parts.attention(config, index, bias=bias, out_bias=bias)
        attention = replace(attention, scale=float(config.attention_multiplier))
        layout = parts.pre_norm_layer(config, index, attention, mlp(config, index))
        return replace(layout, residual_factor=float(config.residual_multiplier))

    return replace(
        parts.decoder(config, layer),
        embedding_factor=float(config.embedding_multiplier),
        logits_factor=1.0 / config.logits_scaling,
    )
