"""Mixtures of experts whose router is a softmax: Mixtral, Qwen, OLMoE, and gpt-oss with sinks and a clamped SwiGLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minifloat.kernels.decoder_layout import (
    Activation,
    AttentionLayout,
    DecoderLayout,
    DeltaLayout,
    ExpertsLayout,
    LayerLayout,
    LinearLayout,
    MlpLayout,
    NormLayout,
    NotNative,
    RouterLayout,
)
from minifloat.model.architecture.decoder import parts


def mixtral(config: Any, index: int) -> LayerLayout:
    attention = replace(parts.attention(config, index), window=config.sliding_window)
    name = f"{parts.layer_name(index)}.mlp"
    router = RouterLayout(f"{name}.gate.weight", top_k=int(config.num_experts_per_tok), normalize=True)
    experts = parts.experts(config, name, int(config.num_local_experts), int(config.intermediate_size), router)
    return parts.pre_norm_layer(config, index, attention, experts)


def qwen2_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 2 mixture: a shared expert behind a gate."""
    attention = parts.attention(config, index, bias=bool(config.qkv_bias))
    attention = replace(attention, window=parts.sliding_window(config, index))
    mlp = _qwen_mlp(config, index)
    if isinstance(mlp, ExpertsLayout):
        name = f"{parts.layer_name(index)}.mlp"
        shared = parts.mlp(config, f"{name}.shared_expert", int(config.shared_expert_intermediate_size))
        mlp = replace(mlp, shared=shared, shared_gate=f"{name}.shared_expert_gate.weight")
    return parts.pre_norm_layer(config, index, attention, mlp)


def qwen3_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of a Qwen 3 mixture: norms of heads."""
    bias, window = bool(config.attention_bias), config.sliding_window
    attention = parts.attention(config, index, bias=bias, out_bias=bias)
    attention = replace(attention, window=window, **parts.head_norms(config, index))
    return parts.pre_norm_layer(config, index, attention, _qwen_mlp(config, index))


def qwen3_vl_moe(config: Any, index: int) -> LayerLayout:
    """Return a layer of the text model of a Qwen3-VL mixture: weights of experts always sum to 1."""
    attention = parts.biased_attention(config, index)
    attention = replace(attention, **parts.head_norms(config, index))
    mlp = _qwen_mlp(config, index)
    if isinstance(mlp, ExpertsLayout):
        mlp = replace(mlp, router=replace(mlp.router, normalize=True), either=True)
    return parts.pre_norm_layer(config, index, attention, mlp)


def olmoe(config: Any, index: int) -> LayerLayout:
    """Return a layer of an OLMoE: norms of q and k over all heads."""
    if config.clip_qkv is not None:
        raise NotNative("it clips q and k after their norms (clip_qkv)")
    attention = parts.biased_attention(config, index)
    attention = replace(attention, **parts.whole_norms(config, index))
    name = f"{parts.layer_name(index)}.mlp"
    router = _qwen_router(config, name)
    experts = parts.experts(config, name, int(config.num_experts), int(config.intermediate_size), router)
    return parts.pre_norm_layer(config, index, attention, experts)


def gpt_oss(config: Any, index: int) -> LayerLayout:
    attention = parts.biased_attention(config, index)
    attention = replace(
        attention,
        window=parts.sliding_window(config, index),
        sinks=f"{parts.layer_name(index)}.self_attn.sinks",
    )
    return parts.pre_norm_layer(config, index, attention, _clamped_experts(config, f"{parts.layer_name(index)}.mlp"))


def _qwen_mlp(config: Any, index: int) -> MlpLayout | ExpertsLayout:
    name = f"{parts.layer_name(index)}.mlp"
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if not is_sparse or index in config.mlp_only_layers:
        return parts.mlp(config, name, int(config.intermediate_size))
    count, intermediate = int(config.num_experts), int(config.moe_intermediate_size)
    return parts.experts(config, name, count, intermediate, _qwen_router(config, name))


def _qwen_router(config: Any, name: str) -> RouterLayout:
    normalize = bool(getattr(config, "norm_topk_prob", False))
    return RouterLayout(f"{name}.gate.weight", top_k=int(config.num_experts_per_tok), normalize=normalize)


def _clamped_experts(config: Any, name: str) -> ExpertsLayout:
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


#: Layers for multi-token prediction.
_UNUSED = (r"^(model\.)?mtp(\.|$)",)


def qwen3_next(config: Any) -> DecoderLayout:
    """Return the layout of a Qwen3-Next: projections ordered by key head, experts in most layers."""

    def mlp(config: Any, index: int) -> MlpLayout | ExpertsLayout:
        is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
        if is_sparse and index not in config.mlp_only_layers:
            return _experts(config, index, normalize=bool(config.norm_topk_prob))
        return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size))

    return _decoder(config, mlp, grouped=True)


def qwen3_5(config: Any) -> DecoderLayout:
    def mlp(config: Any, index: int) -> MlpLayout:
        return parts.mlp(config, f"{parts.layer_name(index)}.mlp", int(config.intermediate_size))

    return _decoder(config, mlp)


def qwen3_5_moe(config: Any) -> DecoderLayout:
    """Return the layout of the text model of a Qwen3.5 mixture: experts in every layer."""
    return _decoder(config, _experts)


def _decoder(config: Any, mlp: Any, *, grouped: bool = False) -> DecoderLayout:
    if "full_attention" not in config.layer_types:
        raise NotNative("none of its layers has attention")

    def layer(config: Any, index: int) -> LayerLayout:
        kind = config.layer_types[index]
        if kind == "linear_attention":
            attention: AttentionLayout | DeltaLayout = _delta(config, index, grouped=grouped)
        elif kind == "full_attention":
            attention = _attention(config, index)
        else:
            raise NotNative(f"layer {index} has {kind!r}")
        layout = parts.pre_norm_layer(config, index, attention, mlp(config, index))
        return replace(layout, input_norm=_offset(layout.input_norm), mlp_norm=_offset(layout.mlp_norm))

    layout = parts.decoder(config, layer, _offset(parts.rms_norm(config, "model.norm")))
    return replace(layout, unused=_UNUSED)


def _attention(config: Any, index: int) -> AttentionLayout:
    """Return attention whose results are multiplied by gates that are rows of q_proj."""
    attention = parts.biased_attention(config, index)
    norms: dict[str, Any] = {name: _offset(norm) for name, norm in parts.head_norms(config, index).items()}
    query, *others = attention.qkv
    query = replace(query, shape=(2 * query.shape[0], query.shape[1]))
    rotary = parts.rotary(config, attention.head_dim, partial=True)
    return replace(attention, qkv=(query, *others), rotary=rotary, gated=True, **norms)


def _delta(config: Any, index: int, *, grouped: bool) -> DeltaLayout:
    if config.hidden_act not in ("silu", "swish"):
        raise NotNative(f"the convolutions of its delta rule have the activation {config.hidden_act!r}, not 'silu'")
    name, hidden = f"{parts.layer_name(index)}.linear_attn", int(config.hidden_size)
    k_heads, v_heads = int(config.linear_num_key_heads), int(config.linear_num_value_heads)
    k_dim, v_dim = int(config.linear_key_head_dim), int(config.linear_value_head_dim)
    width = int(config.linear_conv_kernel_dim)
    if min(k_heads, v_heads, k_dim, v_dim, width) < 1:
        raise ValueError("linear_*: expected numbers of at least 1")
    if v_heads % k_heads:
        raise ValueError(f"linear_num_value_heads: expected a multiple of {k_heads} key heads, found {v_heads}")
    keys, values = k_heads * k_dim, v_heads * v_dim
    if grouped:
        qkvz, ba = {"qkvz": 2 * keys + 2 * values}, {"ba": 2 * v_heads}
    else:
        qkvz, ba = {"qkv": 2 * keys + values, "z": values}, {"b": v_heads, "a": v_heads}
    return DeltaLayout(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        conv_width=width,
        qkvz=tuple(LinearLayout(f"{name}.in_proj_{leaf}", (rows, hidden)) for leaf, rows in qkvz.items()),
        ba=tuple(LinearLayout(f"{name}.in_proj_{leaf}", (rows, hidden)) for leaf, rows in ba.items()),
        out=LinearLayout(f"{name}.out_proj", (hidden, values)),
        conv=f"{name}.conv1d.weight",
        decay=f"{name}.A_log",
        dt_bias=f"{name}.dt_bias",
        norm=parts.rms_norm(config, f"{name}.norm", v_dim),
        grouped=grouped,
    )


def _experts(config: Any, index: int, *, normalize: bool = True) -> ExpertsLayout:
    """Return experts, and one that all tokens use, behind a gate."""
    name = f"{parts.layer_name(index)}.mlp"
    router = RouterLayout(f"{name}.gate.weight", top_k=int(config.num_experts_per_tok), normalize=normalize)
    layout = parts.experts(config, name, int(config.num_experts), int(config.moe_intermediate_size), router)
    shared = parts.mlp(config, f"{name}.shared_expert", int(config.shared_expert_intermediate_size))
    return replace(layout, shared=shared, shared_gate=f"{name}.shared_expert_gate.weight")


def _offset(norm: NormLayout | None) -> NormLayout:
    """Return a norm whose weights are stored less one."""
    assert norm is not None
    return replace(norm, offset=1.0)
