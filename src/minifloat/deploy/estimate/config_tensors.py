"""The tensors of a model, derived from its config alone, for folders without weights and for models yet to be made.

The Llama family and its mixtures of experts are derived here, in milliseconds, by the names in their checkpoints. For
every other architecture transformers builds the model without weights (`meta_model`), which takes seconds. A test holds
the one to what transformers saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, OutputTensor
from minifloat.deploy.estimate.shape import Fields, head_size, is_known
from minifloat.errors import ConfigError
from minifloat.model.architecture.roles import EXPERTS, text_config

_Shapes = dict[str, tuple[int, ...]]

_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
#: Largest number of layers times experts, so that a damaged config cannot exhaust memory.
_MOST_MODULES = 1 << 20
#: The router's bias, which is kept in float32.
_CORRECTION = "e_score_correction_bias"
_HEAD_NORMS = ("qwen3", "qwen3_moe")


def tensors_of(config: Mapping[str, Any], folder: Path) -> tuple[OutputTensor, ...]:
    """Return `derive_tensors` without its note."""
    return derive_tensors(config, folder)[0]


def derive_tensors(config: Mapping[str, Any], folder: Path) -> tuple[tuple[OutputTensor, ...], str]:
    """Return all tensors of a model, in the order of its layers, and a sentence about those that are left out."""
    _refuse_huge(Fields(text_config(config), folder))
    if is_known(config) and text_config(config) is config:
        return _known_tensors(config, folder), ""
    from minifloat.deploy.estimate.meta_model import meta_tensors
    from minifloat.model.architecture.full_config import full_config, quiet_transformers

    with quiet_transformers():
        complete = full_config(config, folder)
        _refuse_huge(Fields(complete.get_text_config(decoder=True), folder))
        return meta_tensors(complete, _dtype(config, folder), folder)


def _refuse_huge(fields: Fields) -> None:
    """Raise ConfigError for numbers of layers and experts that would exhaust memory."""
    layers, experts = fields.optional("num_hidden_layers") or 0, fields.optional(*EXPERTS) or 1
    if layers * experts > _MOST_MODULES:
        raise fields.error(f"{layers} layers of {experts} experts: no model is that large")


def _known_tensors(config: Mapping[str, Any], folder: Path) -> tuple[OutputTensor, ...]:
    """Return the tensors of a model type of `KNOWN_TYPES`."""
    fields = Fields(text_config(config), folder)
    dtype = _DTYPES[_dtype(config, folder)]
    hidden, vocab, layers = (fields.size(name) for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    shapes: _Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        parts = {**_attention(fields), **_mlp(fields, layer), **_norms(fields)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not fields.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return tuple(OutputTensor(name, "F32" if _CORRECTION in name else dtype, shape) for name, shape in shapes.items())


def _dtype(config: Mapping[str, Any], folder: Path) -> str:
    """Return the dtype of the parameters that the config names, by default BF16."""
    nested = text_config(config)
    name = str(next((c[k] for c in (config, nested) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16"))
    if name not in _DTYPES:
        raise ConfigError(folder / CONFIG_FILE, f"dtype {name!r}: expected one of {', '.join(_DTYPES)}")
    return name


def _head_size(fields: Fields) -> int:
    return head_size(fields) or fields.size("head_dim")


def _weights(shapes: _Shapes) -> _Shapes:
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _attention(fields: Fields) -> _Shapes:
    if fields.optional("kv_lora_rank"):
        return _latent_attention(fields)
    hidden, heads, width = fields.size("hidden_size"), fields.size("num_attention_heads"), _head_size(fields)
    q, kv = heads * width, (fields.optional("num_key_value_heads") or heads) * width
    if fields.get("model_type") == "phi3":
        return _weights({"self_attn.qkv_proj": (q + 2 * kv, hidden), "self_attn.o_proj": (hidden, q)})
    rows = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    shapes = _weights({**{name: (size, hidden) for name, size in rows.items()}, "self_attn.o_proj": (hidden, q)})
    if fields.get("attention_bias"):
        rows["self_attn.o_proj"] = hidden
    elif fields.get("model_type") not in ("qwen2", "qwen2_moe"):
        return shapes
    return shapes | {f"{name}.bias": (size,) for name, size in rows.items()}


def _latent_attention(fields: Fields) -> _Shapes:
    """Return the tensors of DeepSeek's latent attention (MLA)."""
    hidden, heads, latent = fields.size("hidden_size"), fields.size("num_attention_heads"), fields.size("kv_lora_rank")
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    value, query = fields.size("v_head_dim"), fields.optional("q_lora_rank")
    if query is None:
        shapes: _Shapes = {"q_proj": (heads * (nope + rope), hidden)}
    else:
        shapes = {
            "q_a_proj": (query, hidden),
            "q_a_layernorm": (query,),
            "q_b_proj": (heads * (nope + rope), query),
        }
    shapes |= {
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }
    return _weights({f"self_attn.{name}": shape for name, shape in shapes.items()})


def _gated(name: str, hidden: int, inner: int) -> _Shapes:
    return _weights(
        {f"{name}.gate_proj": (inner, hidden), f"{name}.up_proj": (inner, hidden), f"{name}.down_proj": (hidden, inner)}
    )


def _mlp(fields: Fields, layer: int) -> _Shapes:
    hidden, model_type = fields.size("hidden_size"), fields.get("model_type")
    if model_type not in _MIXTURES or not _has_experts(fields, layer):
        inner = fields.size("intermediate_size")
        if model_type == "phi3":
            return _weights({"mlp.gate_up_proj": (2 * inner, hidden), "mlp.down_proj": (hidden, inner)})
        return _gated("mlp", hidden, inner)
    experts = fields.size(*EXPERTS)
    if model_type == "mixtral":
        inner = fields.size("intermediate_size")
        shapes: _Shapes = {"block_sparse_moe.gate.weight": (experts, hidden)}
        for expert in range(experts):
            names = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
            shapes |= {f"block_sparse_moe.experts.{expert}.{name}.weight": shape for name, shape in names.items()}
        return shapes
    inner = fields.size("moe_intermediate_size")
    shapes = {"mlp.gate.weight": (experts, hidden)}
    if model_type == "deepseek_v3":
        shapes[f"mlp.gate.{_CORRECTION}"] = (experts,)
    for expert in range(experts):
        shapes |= _gated(f"mlp.experts.{expert}", hidden, inner)
    shared = fields.optional("n_shared_experts")
    if shared is not None:
        shapes |= _gated("mlp.shared_experts", hidden, shared * inner)
    if model_type == "qwen2_moe":
        shapes |= _gated("mlp.shared_expert", hidden, fields.size("shared_expert_intermediate_size"))
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _has_experts(fields: Fields, layer: int) -> bool:
    """Return whether a layer of a mixture has experts; some layers of a mixture are dense."""
    dense = fields.get("mlp_only_layers") or ()
    every = fields.optional("decoder_sparse_step", "moe_layer_freq") or 1
    if fields.get("model_type") in ("deepseek_v2", "deepseek_v3"):
        return layer >= int(fields.get("first_k_dense_replace") or 0) and layer % every == 0
    return layer not in dense and (layer + 1) % every == 0


def _norms(fields: Fields) -> _Shapes:
    hidden, model_type = fields.size("hidden_size"), fields.get("model_type")
    shapes: _Shapes = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    if model_type in _HEAD_NORMS:
        shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (_head_size(fields),))
    return _weights(shapes)
