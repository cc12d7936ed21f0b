"""Parts of decoders as most families have them, by the names of transformers' Llama; families replace what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    RotaryLayout,
    RouterLayout,
)

#: Types of rotary embeddings whose frequencies do not depend on the length of the text; those of "longrope" are chosen
#: once for all texts (`DecoderLayout.with_long_factors`).
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional", "longrope")
#: Names of rotary embeddings in older configs; of "mrope" the coordinates of a position are equal in text.
_OTHER_NAMES = {"mrope": "default", "su": "longrope"}
#: Names of activation functions in configs, and in plans.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
#: Names on disk of experts that are stored one by one, as Mixtral has them.
W1_W2_W3 = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
)


def layer_name(index: int) -> str:
    return f"model.layers.{index}"


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rms_norm(config: Any, name: str, size: int | None = None) -> NormLayout:
    """Return the RMS norm of a module, by default of the residual stream."""
    return NormLayout(f"{name}.weight", (config.hidden_size if size is None else size,), float(config.rms_norm_eps))


def rotary(config: Any, head_dim: int, layer_type: str | None = None, **how: bool) -> RotaryLayout:
    parameters = config.rope_parameters
    if layer_type is not None and isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    reason = _why_not_rope_type(parameters)
    if reason:
        raise NotNative(reason)
    how["partial"] = how.get("partial", False) and parameters.get("rope_type", "default") == "default"
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}
    return RotaryLayout(tuple(sorted(values.items())), head_dim, int(config.max_position_embeddings), **how)


def why_not_rope(config: Mapping[str, Any]) -> str:
    """Return why the decoders do not support the rotary embedding of a text model's config.json; empty if they do."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in stated.values() if isinstance(value, Mapping)]
    return next((reason for reason in map(_why_not_rope_type, nested or [stated]) if reason), "")


def _why_not_rope_type(parameters: Mapping[str, Any]) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = _OTHER_NAMES.get(kind, kind)
    return "" if kind in ROPE_TYPES else f"its rotary embedding is {kind!r}, not one of {', '.join(ROPE_TYPES)}"


def sliding_window(config: Any, index: int) -> int | None:
    """Return the window of a layer where ``layer_types`` says which layers have one."""
    kind = config.layer_types[index]
    if kind not in ("sliding_attention", "full_attention"):
        raise NotNative(f"layer {index} has {kind!r}")
    return int(config.sliding_window) if kind == "sliding_attention" and config.sliding_window else None


def attention(config: Any, index: int, *, bias: bool = False, out_bias: bool = False) -> AttentionLayout:
    """Return attention with one rotary embedding, without norms and window."""
    name, hidden, d = f"{layer_name(index)}.self_attn", int(config.hidden_size), head_size(config)
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    return AttentionLayout(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        scale=d**-0.5,
        qkv=(
            LinearLayout(f"{name}.q_proj", (heads * d, hidden), bias),
            LinearLayout(f"{name}.k_proj", (kv_heads * d, hidden), bias),
            LinearLayout(f"{name}.v_proj", (kv_heads * d, hidden), bias),
        ),
        out=LinearLayout(f"{name}.o_proj", (hidden, heads * d), out_bias),
        rotary=rotary(config, d),
    )


def biased_attention(config: Any, index: int) -> AttentionLayout:
    """Return attention whose four linears have biases if `attention_bias` says so."""
    bias = bool(config.attention_bias)
    return attention(config, index, bias=bias, out_bias=bias)


def head_norms(config: Any, index: int) -> dict[str, Any]:
    """Return the fields of RMS norms of each head of q and k."""
    name, d = f"{layer_name(index)}.self_attn", head_size(config)
    return {"q_norm": rms_norm(config, f"{name}.q_norm", d), "k_norm": rms_norm(config, f"{name}.k_norm", d)}


def whole_norms(config: Any, index: int) -> dict[str, Any]:
    """Return the fields of RMS norms of q and k over all heads."""
    name, d = f"{layer_name(index)}.self_attn", head_size(config)
    return {
        "q_norm": rms_norm(config, f"{name}.q_norm", config.num_attention_heads * d),
        "k_norm": rms_norm(config, f"{name}.k_norm", config.num_key_value_heads * d),
        "whole_norms": True,
    }


def activation(config: Any, *, gated: bool = True) -> Activation:
    """Return the function of a config's MLPs."""
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in ACTIVATIONS:
        raise NotNative(f"its activation is {name!r}, not one of {', '.join(ACTIVATIONS)}")
    return Activation(ACTIVATIONS[name], gated)


def mlp(config: Any, name: str, intermediate: int, *, bias: bool = False) -> MlpLayout:
    """Return a gated MLP of three linears."""
    hidden = int(config.hidden_size)
    return MlpLayout(
        gate_up=(
            LinearLayout(f"{name}.gate_proj", (intermediate, hidden), bias),
            LinearLayout(f"{name}.up_proj", (intermediate, hidden), bias),
        ),
        down=LinearLayout(f"{name}.down_proj", (hidden, intermediate), bias),
        activation=activation(config),
    )


def fused_mlp(config: Any, name: str, intermediate: int, names: tuple[str, str]) -> MlpLayout:
    """Return a gated MLP whose gate and up are one linear; `names`: of that, and of the last linear."""
    hidden = int(config.hidden_size)
    return MlpLayout(
        gate_up=(LinearLayout(f"{name}.{names[0]}", (2 * intermediate, hidden)),),
        down=LinearLayout(f"{name}.{names[1]}", (hidden, intermediate)),
        activation=activation(config),
    )


def plain_mlp(config: Any, name: str, names: tuple[str, str], *, bias: bool = False) -> MlpLayout:
    """Return an MLP without a gate; `names`: of its two linears."""
    hidden, intermediate = int(config.hidden_size), int(config.intermediate_size)
    return MlpLayout(
        gate_up=(LinearLayout(f"{name}.{names[0]}", (intermediate, hidden), bias),),
        down=LinearLayout(f"{name}.{names[1]}", (hidden, intermediate), bias),
        activation=activation(config, gated=False),
    )


def experts(config: Any, name: str, count: int, intermediate: int, router: RouterLayout) -> ExpertsLayout:
    return ExpertsLayout(
        router=router,
        gate_up=f"{name}.experts.gate_up_proj",
        down=f"{name}.experts.down_proj",
        count=count,
        shape=(intermediate, int(config.hidden_size)),
        experts=tuple(mlp(config, f"{name}.experts.{index}", intermediate) for index in range(count)),
        activation=activation(config),
    )


def pre_norm_layer(
    config: Any, index: int, attention: AttentionLayout | DeltaLayout, mlp: MlpLayout | ExpertsLayout
) -> LayerLayout:
    name = layer_name(index)
    return LayerLayout(
        name=name,
        input_norm=rms_norm(config, f"{name}.input_layernorm"),
        attention=attention,
        mlp_norm=rms_norm(config, f"{name}.post_attention_layernorm"),
        mlp=mlp,
    )


def decoder(config: Any, layer: Callable[[Any, int], LayerLayout], norm: NormLayout | None = None) -> DecoderLayout:
    hidden = int(config.hidden_size)
    return DecoderLayout(
        hidden=hidden,
        layers=tuple(layer(config, index) for index in range(config.num_hidden_layers)),
        embedding="model.embed_tokens.weight",
        norm=norm or rms_norm(config, "model.norm"),
        lm_head=LinearLayout("lm_head", (int(config.vocab_size), hidden)),
    )
