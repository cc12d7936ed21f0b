"""gpt-oss: attention with sinks and alternating windows, and experts with a clamped SwiGLU and biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    Activation,
    DecoderLayout,
    ExpertsLayout,
    LayerLayout,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts


def gpt_oss(config: Any) -> DecoderLayout:
    """Return the layout of a gpt-oss."""
    return parts.decoder(config, _layer)


def _layer(config: Any, index: int) -> LayerLayout:
    bias = bool(config.attention_bias)
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(
        attention,
        window=parts.sliding_window(config, index),
        sinks=f"{parts.layer_name(index)}.self_attn.sinks",
    )
    return parts.pre_norm_layer(config, index, attention, _experts(config, f"{parts.layer_name(index)}.mlp"))


def _experts(config: Any, name: str) -> ExpertsLayout:
    top_k = int(config.num_experts_per_tok)
    return ExpertsLayout(
        router=RouterLayout(f"{name}.router.weight", top_k=top_k, kind="softmax_of_chosen", bias=f"{name}.router.bias"),
        gate_up=f"{name}.experts.gate_up_proj",
        down=f"{name}.experts.down_proj",
        count=int(config.num_local_experts),
        shape=(int(config.intermediate_size), int(config.hidden_size)),
        gate_up_bias=f"{name}.experts.gate_up_proj_bias",
        down_bias=f"{name}.experts.down_proj_bias",
        activation=Activation(
            "clamped_swiglu",
            alpha=float(getattr(config, "swiglu_alpha", 1.702)),  # transformers 5.10 has no field for these
            limit=float(getattr(config, "swiglu_limit", 7.0)),
        ),
        transposed=True,
        interleaved=True,
    )
