"""Gemma 4's text model: two sizes of heads, shared keys and values, inputs of layers, experts beside an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    AttentionLayout,
    DecoderLayout,
    ExpertNormsLayout,
    ExpertsLayout,
    LayerInputLayout,
    LayerInputsLayout,
    LayerLayout,
    LinearLayout,
    MlpLayout,
    NormLayout,
    NotNative,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts

#: What transformers reads for each layer; anything else in ``per_layer_config`` it refuses.
_OF_LAYERS = {"head_dim", "num_key_value_heads"}


def gemma4(config: Any) -> DecoderLayout:
    if config.use_bidirectional_attention == "all":
        raise NotNative("its tokens see those after them (use_bidirectional_attention)")
    others = set(getattr(config, "per_layer_attributes", None) or ()) - _OF_LAYERS
    if others:
        raise NotNative(f"its layers differ in {min(others)} (per_layer_config)")
    layout = parts.decoder(config, _layer)
    sharing = [index for index, layer in enumerate(layout.layers) if layer.cache_of is not None]
    return replace(
        layout,
        embedding_factor=float(config.hidden_size**0.5),
        rounds_embedding_factor=True,
        logits_cap=config.final_logit_softcapping,
        inputs=_inputs(config),
        unused=tuple(rf"(^|\.)layers\.{index}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\." for index in sharing),
    )


def _layer(config: Any, index: int) -> LayerLayout:
    name, source = parts.layer_name(index), _source(config, index)
    wide = 2 if config.use_double_wide_mlp and source is not None else 1
    mlp = parts.mlp(config, f"{name}.mlp", wide * int(config.intermediate_size))
    return LayerLayout(
        name=name,
        input_norm=parts.rms_norm(config, f"{name}.input_layernorm"),
        attention=_attention(config, index, shares=source is not None),
        attention_norm=parts.rms_norm(config, f"{name}.post_attention_layernorm"),
        mlp_norm=parts.rms_norm(config, f"{name}.pre_feedforward_layernorm"),
        mlp=_experts(config, name, mlp) if config.enable_moe_block else mlp,
        result_norm=parts.rms_norm(config, f"{name}.post_feedforward_layernorm"),
        cache_of=source,
        input=_input(config, name) if config.hidden_size_per_layer_input else None,
        scalar=f"{name}.layer_scalar",
    )


def _source(config: Any, index: int) -> int | None:
    """Return the layer whose keys and values a layer reads, the last one of its type that has its own; or None."""
    first = int(config.num_hidden_layers) - int(config.num_kv_shared_layers)
    if index < first:
        return None
    kind = config.layer_types[index]
    sources = [source for source in range(first) if config.layer_types[source] == kind]
    if not sources:
        raise ValueError(f"num_kv_shared_layers: no {kind} layer before layer {index} has keys and values of its own")
    return sources[-1]


def _attention(config: Any, index: int, *, shares: bool) -> AttentionLayout:
    kind, window = config.layer_types[index], parts.sliding_window(config, index)
    heads, (d, kv_heads) = int(config.num_attention_heads), _sizes(config, index)
    name, hidden, bias = f"{parts.layer_name(index)}.self_attn", int(config.hidden_size), bool(config.attention_bias)
    values = "shared" if shares else "keys" if config.attention_k_eq_v and kind == "full_attention" else "own"
    rows = {"q_proj": heads * d, "k_proj": kv_heads * d, "v_proj": kv_heads * d}
    own: dict[str, Any] = {}
    if not shares:
        own["k_norm"] = parts.rms_norm(config, f"{name}.k_norm", d)
        own["v_norm"] = NormLayout(None, (d,), float(config.rms_norm_eps))
    linears = [LinearLayout(f"{name}.{linear}", (count, hidden), bias) for linear, count in rows.items()]
    return AttentionLayout(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        scale=1.0,
        qkv=tuple(linears[: {"own": 3, "keys": 2, "shared": 1}[values]]),
        out=LinearLayout(f"{name}.o_proj", (hidden, heads * d), bias),
        rotary=parts.rotary(config, d, kind),
        q_norm=parts.rms_norm(config, f"{name}.q_norm", d),
        window=window,
        values=values,
        **own,
    )


def _sizes(config: Any, index: int) -> tuple[int, int]:
    """Return the size of a layer's heads, and the number of its key-value heads."""
    layers: Sequence[Any] | None = getattr(config, "per_layer_config", None)
    if layers is not None:
        return int(layers[index].head_dim), int(layers[index].num_key_value_heads)
    # before transformers 5.20, those of full attention have fields of their own
    d, kv_heads = int(config.head_dim), int(config.num_key_value_heads)
    if config.layer_types[index] != "full_attention":
        return d, kv_heads
    of_keys = config.num_global_key_value_heads if config.attention_k_eq_v else None
    return int(config.global_head_dim or d), int(of_keys or kv_heads)


def _experts(config: Any, name: str, mlp: MlpLayout) -> ExpertsLayout:
    hidden, eps = int(config.hidden_size), float(config.rms_norm_eps)
    router = RouterLayout(
        f"{name}.router.proj.weight",
        top_k=int(config.top_k_experts),
        normalize=True,
        scales=f"{name}.router.per_expert_scale",
    )
    experts = parts.experts(config, name, int(config.num_experts), int(config.moe_intermediate_size), router)
    norms = ExpertNormsLayout(
        router=NormLayout(f"{name}.router.scale", (hidden,), eps, factor=hidden**-0.5),
        input=parts.rms_norm(config, f"{name}.pre_feedforward_layernorm_2"),
        experts=parts.rms_norm(config, f"{name}.post_feedforward_layernorm_2"),
        mlp=parts.rms_norm(config, f"{name}.post_feedforward_layernorm_1"),
    )
    return replace(experts, shared=mlp, norms=norms)


def _input(config: Any, name: str) -> LayerInputLayout:
    size, hidden = int(config.hidden_size_per_layer_input), int(config.hidden_size)
    return LayerInputLayout(
        gate=LinearLayout(f"{name}.per_layer_input_gate", (size, hidden)),
        out=LinearLayout(f"{name}.per_layer_projection", (hidden, size)),
        norm=parts.rms_norm(config, f"{name}.post_per_layer_input_norm"),
        activation=parts.activation(config),
    )


def _inputs(config: Any) -> LayerInputsLayout | None:
    size, hidden = int(config.hidden_size_per_layer_input or 0), int(config.hidden_size)
    if not size:
        return None
    if config.vocab_size_per_layer_input != config.vocab_size:
        rows = f"{config.vocab_size_per_layer_input} rows, its embedding {config.vocab_size}"
        raise NotNative(f"the table of the inputs of its layers has {rows} (vocab_size_per_layer_input)")
    # transformers scales the projection by hidden ** -0.5 before its norm: here its square is in the epsilon
    eps = float(config.rms_norm_eps) * hidden
    return LayerInputsLayout(
        table="model.embed_tokens_per_layer.weight",
        projection=LinearLayout("model.per_layer_model_projection", (int(config.num_hidden_layers) * size, hidden)),
        norm=replace(parts.rms_norm(config, "model.per_layer_projection_norm", size), eps=eps),
        table_factor=float(size**0.5),
        factor=2.0**-0.5,
    )
