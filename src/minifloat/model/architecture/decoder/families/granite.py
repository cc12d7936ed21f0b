"""Granite and its mixtures: factors of the embedding, the attention, the results of layers and the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.decoder.plan import DecoderPlan, ExpertsPlan, LayerPlan, MlpPlan, RouterPlan


def granite(config: Any) -> DecoderPlan:
    """Return the plan of a dense Granite."""

    def mlp(config: Any, index: int) -> MlpPlan:
        name, bias = f"{parts.layer_name(index)}.mlp", bool(config.mlp_bias)
        return parts.mlp(config, name, int(config.intermediate_size), bias=bias)

    return _decoder(config, mlp)


def granite_moe(config: Any) -> DecoderPlan:
    """Return the plan of a Granite mixture: softmax over the chosen experts, and an MLP beside them in some models."""
    plan = _decoder(config, _experts)
    renamings = (
        (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
    return replace(plan, renamings=renamings)


def _experts(config: Any, index: int) -> ExpertsPlan:
    name = f"{parts.layer_name(index)}.block_sparse_moe"
    router = RouterPlan(f"{name}.router.weight", int(config.num_experts_per_tok), kind="softmax_of_chosen")
    plan = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    shared = int(getattr(config, "shared_intermediate_size", 0))
    if not shared:
        return plan
    names = ("input_linear", "output_linear")
    return replace(plan, shared=parts.fused_mlp(config, f"{parts.layer_name(index)}.shared_mlp", shared, names))


def _decoder(config: Any, mlp: Callable[[Any, int], MlpPlan | ExpertsPlan]) -> DecoderPlan:
    def layer(config: Any, index: int) -> LayerPlan:
        bias = bool(config.attention_bias)
        attention = parts.attention(config, index, bias=bias, out_bias=bias)
        attention = replace(attention, scale=float(config.attention_multiplier))
        plan = parts.pre_norm_layer(config, index, attention, mlp(config, index))
        return replace(plan, residual_factor=float(config.residual_multiplier))

    return replace(
        parts.decoder(config, layer),
        embedding_factor=float(config.embedding_multiplier),
        logits_factor=1.0 / config.logits_scaling,
    )
