"""Small random models of every family that the native decoder runs, with weights at which every part matters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2}
_WINDOWS: dict[str, Any] = {
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
}
_GEMMA4: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 21,
    "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    },
}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_LATENT_YARN = _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
_PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}

_DELTA: dict[str, Any] = {
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rope_parameters": _PARTIAL,
}
_SHARED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}

#: Name -> ``model_type`` and what its config has beside the common sizes.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 21}),
    "ministral": ("ministral", {**_WINDOWS, "head_dim": 24}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "seed_oss": ("seed_oss", {"head_dim": 24, "attention_bias": True, "attention_out_bias": False}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 19}),
    "arcee": ("arcee", {"mlp_bias": True}),
    "helium": ("helium", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "head_dim": 24}),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": None}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "qwen3_next": ("qwen3_next", {**_DELTA, **_SHARED, "norm_topk_prob": True, "mlp_only_layers": [2]}),
    "qwen3_5_text": ("qwen3_5_text", {**_DELTA, "attention_bias": True, "linear_num_value_heads": 2}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**_DELTA, **_SHARED}),
    "qwen2_vl": ("qwen2_vl_text", {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 24, "attention_bias": True}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "gpt_oss": (
        "gpt_oss",
        {**_EXPERTS, **_WINDOWS, "head_dim": 16, "rope_parameters": _YARN | {"truncate": False}, "swiglu_limit": 0.9},
    ),
    "gemma": ("gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {
            **_WINDOWS,
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": ("gemma3_text", {**_WINDOWS, "head_dim": 24, "query_pre_attn_scalar": 40}),
    "gemma4_text": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 3,
            "global_head_dim": 40,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4_text with experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 40,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 21, "rope_parameters": _PARTIAL}),
    "phi3 longrope": ("phi3", {"original_max_position_embeddings": 256}),
    "glm": ("glm", {"head_dim": 24, "attention_bias": True, "rope_parameters": _PARTIAL}),
    "glm4": ("glm4", {"head_dim": 24, "attention_bias": True, "rope_parameters": _PARTIAL}),
    "glm4_moe": (
        "glm4_moe",
        {**_GROUPS, "head_dim": 24, "use_qk_norm": True, "attention_bias": True, "rope_parameters": _PARTIAL},
    ),
    "dots1": ("dots1", {**_GROUPS, "head_dim": 24, **_WINDOWS}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_GROUPS, **_LATENT, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": _LATENT_YARN},
    ),
    "deepseek_v2 in groups": (
        "deepseek_v2",
        {**_GROUPS, **_LATENT, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v3": ("deepseek_v3", {**_GROUPS, **_LATENT, "rope_parameters": _LATENT_YARN}),
    "deepseek_v3 without q_lora_rank": (
        "deepseek_v3",
        {**_GROUPS, **_LATENT, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_GROUPS, **_LATENT, "attention_bias": True}),
    "youtu": ("youtu", _LATENT),
    "minicpm3": (
        "minicpm3",
        {**_LATENT, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 40, "tie_word_embeddings": True},
    ),
    "minimax_m2": ("minimax_m2", {**_EXPERTS, "head_dim": 24, "rope_parameters": _PARTIAL}),
    "granite": ("granite", {**_FACTORS, "attention_bias": True}),
    "granitemoe": ("granitemoe", {**_FACTORS, **_EXPERTS}),
    "granitemoeshared": ("granitemoeshared", {**_FACTORS, **_EXPERTS, "shared_intermediate_size": 96}),
    "olmo": ("olmo", {"clip_qkv": 1.2}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {**_WINDOWS}),
    "exaone4": ("exaone4", {**_WINDOWS, "head_dim": 24}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {**_WINDOWS, "logit_scale": 0.3, "head_dim": 24}),
    "starcoder2": ("starcoder2", {"use_bias": True, "sliding_window": 21, "hidden_act": "gelu_pytorch_tanh"}),
    "nemotron": ("nemotron", {"head_dim": 24, "rope_parameters": _PARTIAL}),
    "stablelm": ("stablelm", {"use_parallel_residual": True, "rope_parameters": _PARTIAL}),
    "stablelm in series": ("stablelm", {"use_qkv_bias": True, "rope_parameters": _PARTIAL}),
}


#: Case -> the tower of the only class that transformers has for it; positions have three coordinates.
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64},
    "qwen3_vl": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64},
    "qwen3_vl_moe": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 64},
}
_DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}


def config_of(name: str, **changes: Any) -> Any:
    """Return transformers' config of a case."""
    model_type, extra = CASES[name]
    values = SIZES | extra | changes
    if name == "phi3 longrope":
        count = values["hidden_size"] // values["num_attention_heads"] // 4  # half of each head turns, in pairs
        factors = {
            "short_factor": [1 + i / count for i in range(count)],
            "long_factor": [1.0 + i for i in range(count)],
        }
        values["rope_parameters"] = _LONGROPE | factors
    if name not in _VISION:
        return CONFIG_MAPPING[model_type](**values)
    half = values.get("head_dim", values["hidden_size"] // values["num_attention_heads"]) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections}
    vision = _VISION[name] | (_DEEPSTACK if name.startswith("qwen3") else {})
    tokens = {"image_token_id": VOCAB + 1, "video_token_id": VOCAB + 2, "vision_start_token_id": VOCAB + 3}
    return CONFIG_MAPPING[name](text_config=values, vision_config=vision, tie_word_embeddings=False, **tokens)


def model_of(name: str, **changes: Any) -> Any:
    """Return a float32 model with bfloat16 values as weights, so that packing does not change them."""
    models: Any = transformers.AutoModelForImageTextToText if name in _VISION else transformers.AutoModelForCausalLM
    return randomized(models.from_config(config_of(name, **changes), attn_implementation="eager"))


def quantizable_sizes(name: str) -> dict[str, int]:
    """Return changes of a case whose linears have columns that the groups of all schemes divide."""
    fields = CASES[name][1]
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    sizes |= {"moe_intermediate_size": 128} if "moe_intermediate_size" in fields else {}
    sizes |= {"linear_value_head_dim": 32} if "linear_value_head_dim" in fields else {}
    if "kv_lora_rank" not in fields:
        return sizes | {"head_dim": 32}
    return (
        sizes
        | {"kv_lora_rank": 160, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
        | ({"q_lora_rank": 96} if fields["q_lora_rank"] else {})
    )


#: Names of parameters that multiply something.
_SCALES = re.compile("norm|scalar|scale$")


def randomized(model: Any, seed: int = 0) -> Any:
    """Fill a model with random weights, norms and biases away from their usual values."""
    torch.manual_seed(seed)
    model = model.float().eval()
    with torch.no_grad():
        tensors = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name.endswith(("correction_bias", "layer_scalar"))
        }
        for name, tensor in tensors.items():
            centre = 1.0 if tensor.ndim == 1 and _SCALES.search(name) and bool((tensor == 1).all()) else 0.0
            width = 0.15 if tensor.ndim > 1 else 1.5 if name.endswith("sinks") else 0.3
            tensor.copy_((torch.randn_like(tensor) * width + centre).bfloat16())
    return model


def write(model: Any, folder: Path) -> Path:
    """Write a checkpoint with a tokenizer of words, and return its folder."""
    from tokenizers import Tokenizer, models

    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    """Return a greedy continuation by transformers' code, without a cache; one pass checks all tokens of a guess."""
    tokens = list(prompt)
    while (made := len(tokens) - len(prompt)) < count:
        ahead = list(guess[made : count - 1])
        logits = model(torch.tensor([tokens + ahead]), use_cache=False).logits[0, len(tokens) - 1 :]
        best = logits.argmax(-1).tolist()
        right = next((i for i, token in enumerate(ahead) if token != best[i]), len(ahead))
        tokens += best[: right + 1]
    return tokens[len(prompt) :]


#: Model with a tower -> the case of its text model, the type of its tower, and further fields.
TOWERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", "gemma4_vision", {"image_token_id": VOCAB + 1, "audio_config": None}),
    "gemma4 with experts": ("gemma4_text with experts", "gemma4_vision", {"image_token_id": VOCAB + 1}),
    "llava_next": ("qwen2", "clip_vision_model", {"image_token_index": VOCAB - 1}),
    "gemma3": ("gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4, "image_token_index": VOCAB - 1}),
    "llava": ("llama", "clip_vision_model", {"image_token_index": VOCAB - 1}),
    "mistral3": ("mistral", "pixtral", {"image_token_index": VOCAB - 1}),
    "qwen3_5": ("qwen3_5_text", "qwen3_5_vision", {"image_token_id": VOCAB - 1}),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen3_5_moe_vision", {"image_token_id": VOCAB - 1}),
}
_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 28,
    "patch_size": 14,
}


def config_with_tower(name: str) -> Any:
    """Return the config of a model with a tower for images around a text model."""
    case, tower, extra = TOWERS[name]
    head = {"head_dim": 16} if tower in ("pixtral", "gemma4_vision") else {}
    text = config_of(case, **{"pad_token_id": 0} if tower == "gemma4_vision" else {}).to_dict()
    return CONFIG_MAPPING[name.split()[0]](
        text_config=text, vision_config=_TOWER | head | {"model_type": tower}, tie_word_embeddings=False, **extra
    )


def with_tower(name: str) -> Any:
    """Return a model with a tower for images around a text model."""
    models: Any = transformers.AutoModelForImageTextToText
    return randomized(models.from_config(config_with_tower(name), attn_implementation="eager"))
