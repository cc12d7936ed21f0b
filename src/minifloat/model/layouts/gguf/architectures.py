"""The table of architectures: how llama.cpp names the models of a class of transformers, and what it reads of a config.

To add one, add a row; tests/quantize/convert/test_gguf.py needs a small config of it.
Source: llama.cpp, ``conversion/`` and ``src/models/``; gguf 0.19, ``gguf_writer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from minifloat.errors import UsageError
from minifloat.model.architecture.rotary import llama3_frequencies

if TYPE_CHECKING:
    import gguf

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """The models of some classes of transformers in llama.cpp."""

    classes: str  #: with spaces between
    name: str  #: of the row of `gguf.MODEL_ARCH`
    pairs: bool = False  #: whether rotary embedding turns neighbours in llama.cpp, and halves of a head in transformers
    norm_shift: float = 0.0  #: what transformers adds to the weights of norms
    also: str = ""  #: ``method=field`` of a number that is written besides those of all architectures
    tokens: tuple[tuple[str, str], ...] = ()  #: kinds of special tokens, and their texts

    @property
    def row(self) -> gguf.MODEL_ARCH:
        import gguf

        return gguf.MODEL_ARCH[self.name]


_PHI3 = "PHI3"  #: the architecture whose factors of longrope llama.cpp reads
_GLM_TOKENS = (
    *(("eos", "<|endoftext|>"), ("eot", "<|user|>")),
    *(("unk", "<|endoftext|>"), ("bos", "<|endoftext|>")),
)
ARCHITECTURES = (
    Architecture("LlamaForCausalLM MistralForCausalLM MixtralForCausalLM", "LLAMA", pairs=True),
    Architecture("Qwen2ForCausalLM", "QWEN2"),
    Architecture("Qwen3ForCausalLM", "QWEN3"),
    Architecture("Qwen3MoeForCausalLM", "QWEN3MOE", also="add_expert_feed_forward_length=moe_intermediate_size"),
    Architecture(
        "Gemma3ForCausalLM Gemma3ForConditionalGeneration",
        "GEMMA3",
        norm_shift=1.0,
        also="add_sliding_window=sliding_window add_final_logit_softcapping=final_logit_softcapping",
    ),
    Architecture("Phi3ForCausalLM", _PHI3),
    Architecture("Glm4ForCausalLM", "GLM4", tokens=_GLM_TOKENS),
    Architecture(
        "GptOssForCausalLM",
        "GPT_OSS",
        also="add_sliding_window=sliding_window add_expert_feed_forward_length=intermediate_size",
    ),
    Architecture("Olmo2ForCausalLM", "OLMO2"),
    Architecture(
        "GraniteForCausalLM",
        "GRANITE",
        pairs=True,
        also="add_attention_scale=attention_multiplier add_embedding_scale=embedding_multiplier "
        "add_residual_scale=residual_multiplier add_logit_scale=logits_scaling",
    ),
    Architecture("SmolLM3ForCausalLM", "SMOLLM3", pairs=True),
)
#: Class of transformers -> the row that has it.
BY_CLASS = {name: row for row in ARCHITECTURES for name in row.classes.split()}
#: Method of `gguf.GGUFWriter` -> the fields of a config that may state its number; the first that does is written.
_FIELDS = {
    "add_context_length": "max_position_embeddings",
    "add_embedding_length": "hidden_size",
    "add_feed_forward_length": "intermediate_size",
    "add_head_count": "num_attention_heads",
    "add_head_count_kv": "num_key_value_heads num_attention_heads",
    "add_layer_norm_rms_eps": "rms_norm_eps",
    "add_vocab_size": "vocab_size",
    "add_expert_count": "num_local_experts num_experts",
    "add_expert_used_count": "num_experts_per_tok",
}
#: Likewise for the numbers of YaRN.
_YARN = {
    "add_rope_scaling_factor": "factor",
    "add_rope_scaling_orig_ctx_len": "original_max_position_embeddings",
    "add_rope_scaling_yarn_ext_factor": "extrapolation_factor",
    "add_rope_scaling_yarn_attn_factor": "attention_factor attn_factor",
    "add_rope_scaling_yarn_beta_fast": "beta_fast",
    "add_rope_scaling_yarn_beta_slow": "beta_slow",
}
_THETA = 10_000.0
#: SmolLM 3 has rotary embedding in all layers but every fourth, and llama.cpp knows no other pattern.
_NO_ROPE_EVERY = 4
_GEMMA3_27B = 62  #: layers of the Gemma 3 that scales queries by its width


def architecture_of(config: Config) -> Architecture:
    names = config.get("architectures") or ["without architectures"]
    if names[0] not in BY_CLASS:
        raise UsageError(f"architecture {names[0]}: no GGUF is written of it; those that are: {', '.join(BY_CLASS)}")
    return BY_CLASS[names[0]]


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Config) -> dict[str, Any]:
    """Return the parameters of rotary embedding of layers with full attention."""
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    return dict(rope.get("full_attention") or rope)


def write_hyperparameters(writer: gguf.GGUFWriter, row: Architecture, config: Config) -> None:
    """Write what llama.cpp reads of a config."""
    _refuse(row, config)
    writer.add_block_count(config["num_hidden_layers"])
    also = dict(entry.split("=") for entry in row.also.split())
    for method, fields in {**_FIELDS, **also}.items():
        value = next((config[field] for field in fields.split() if config.get(field) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    if "add_sliding_window" in also:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if row.name == _PHI3:
        writer.add_sliding_window(config.get("sliding_window") or 0)  # 0 tells llama.cpp Phi-4 from Phi-3
    size, rope = head_dim(config), _rope(config)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(int(size * (rope.get("partial_rotary_factor") or 1.0)))
    writer.add_rope_freq_base(rope.get("rope_theta", _THETA))
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if local is not None:
        writer.add_rope_freq_base_swa(local.get("rope_theta", _THETA))
    _write_scaling(writer, config, rope)


def _refuse(row: Architecture, config: Config) -> None:
    kind = _rope(config).get("rope_type") or "default"
    if kind not in (
        "default",
        "linear",
        "yarn",
        "llama3" if row.pairs else "",
        "longrope" if row.name == _PHI3 else "",
    ):
        raise UsageError(f"rope_type {kind!r}: llama.cpp does not run {row.name.lower()} with it")
    for field, value in _fixed(row, config).items():
        if config.get(field) not in (None, value):
            raise UsageError(f"{field} is {config[field]}: llama.cpp runs {row.name.lower()} with {value} only")


def _fixed(row: Architecture, config: Config) -> dict[str, Any]:
    """Return the fields for which llama.cpp's code has one value."""
    layers = config["num_hidden_layers"]
    match row.name:
        case "SMOLLM3":
            return {"no_rope_layers": [int((layer + 1) % _NO_ROPE_EVERY != 0) for layer in range(layers)]}
        case "QWEN3MOE":
            return {"norm_topk_prob": True}
        case "GEMMA3" if layers == _GEMMA3_27B:
            return {"query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]}
        case "GEMMA3":
            return {"query_pre_attn_scalar": head_dim(config)}
    return {}


def _write_scaling(writer: gguf.GGUFWriter, config: Config, rope: Config) -> None:
    import gguf

    kind = rope.get("rope_type")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        for method, fields in _YARN.items():
            value = next((rope[field] for field in fields.split() if rope.get(field) is not None), None)
            if value is not None:
                getattr(writer, method)(value)
    elif kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        original = _original_length(config, rope)
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def _original_length(config: Config, rope: Config) -> int:
    stated = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    return int(stated or config["max_position_embeddings"])


def rope_tensors(config: Config) -> dict[str, npt.NDArray[np.float32]]:
    """Return the tensors of frequency divisors by their names, which Llama 3's scaling and longrope have."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size = head_dim(config)
    frequencies = rope["rope_theta"] ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    divisors = frequencies / llama3_frequencies(frequencies, rope)
    return {"rope_freqs.weight": divisors.astype(np.float32)}
