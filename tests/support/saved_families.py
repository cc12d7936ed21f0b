"""Small models of families whose checkpoints differ from transformers' modules, with random weights in BF16."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers as t
from transformers import PreTrainedModel

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 28,
    "patch_size": 14,
}
_EXPERTS = {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
_LAYER_TYPES = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}


def _gemma3() -> PreTrainedModel:
    text = _TEXT | {"intermediate_size": 128, "sliding_window": 32, "query_pre_attn_scalar": 32}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 127, "boi_token_index": 126, "eoi_token_index": 125}
    return t.Gemma3ForConditionalGeneration(t.Gemma3Config(text_config=text, vision_config=_VISION, **tokens))


def _mistral3() -> PreTrainedModel:
    text = _TEXT | {"model_type": "mistral", "intermediate_size": 128}
    vision = _VISION | {"model_type": "pixtral", "head_dim": 16}
    config = t.Mistral3Config(text_config=text, vision_config=vision, image_token_index=10)
    return t.Mistral3ForConditionalGeneration(config)


def _aria() -> PreTrainedModel:
    experts = {"intermediate_size": 96, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    vision = _VISION | {"model_type": "idefics3_vision"}
    config = t.AriaConfig(text_config=_TEXT | experts | {"model_type": "aria_text"}, vision_config=vision)
    return t.AriaForConditionalGeneration(config)


def _biogpt() -> PreTrainedModel:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return t.BioGptForCausalLM(t.BioGptConfig(**sizes, vocab_size=128, max_position_embeddings=256))


def _phimoe() -> PreTrainedModel:
    return t.PhimoeForCausalLM(t.PhimoeConfig(**_TEXT, **_EXPERTS))


def _granitemoe() -> PreTrainedModel:
    return t.GraniteMoeForCausalLM(t.GraniteMoeConfig(**_TEXT, **_EXPERTS))


def _granitemoeshared() -> PreTrainedModel:
    return t.GraniteMoeSharedForCausalLM(t.GraniteMoeSharedConfig(**_TEXT, **_EXPERTS, shared_intermediate_size=96))


def _granitemoehybrid() -> PreTrainedModel:
    layers = {"shared_intermediate_size": 96, "layer_types": ["attention", "attention"]}
    return t.GraniteMoeHybridForCausalLM(t.GraniteMoeHybridConfig(**_TEXT, **_EXPERTS, **layers))


def _llama4() -> PreTrainedModel:
    experts = {"intermediate_size": 96, "intermediate_size_mlp": 160, "num_local_experts": 4, "num_experts_per_tok": 1}
    text = _TEXT | experts | {"interleave_moe_layer_step": 1, "attention_chunk_size": 64}
    projector = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    vision = _VISION | projector | {"pixel_shuffle_ratio": 0.5}
    return t.Llama4ForConditionalGeneration(t.Llama4Config(text_config=text, vision_config=vision))


def _qwen3_vl_moe(inner: int = 96) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 8}
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    text = _TEXT | _QWEN_EXPERTS | {"rope_parameters": rope, "moe_intermediate_size": inner}
    config = t.Qwen3VLMoeConfig(text_config=text, vision_config=vision | {"deepstack_visual_indexes": [0]})
    return t.Qwen3VLMoeForConditionalGeneration(config)


def _gemma4() -> PreTrainedModel:
    experts = {"intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 4, "top_k_experts": 2}
    heads = {"global_head_dim": 32, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0}
    embeddings = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "enable_moe_block": True}
    vision = _VISION | {"num_key_value_heads": 4, "head_dim": 16}
    config = t.Gemma4Config(
        text_config=_TEXT | experts | heads | embeddings | _LAYER_TYPES, vision_config=vision, audio_config=None
    )
    return t.Gemma4ForConditionalGeneration(config)


def _gpt_oss() -> PreTrainedModel:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return t.GptOssForCausalLM(t.GptOssConfig(**_TEXT, **_EXPERTS, **_LAYER_TYPES, **rope))


def _mixtral() -> PreTrainedModel:
    return t.MixtralForCausalLM(t.MixtralConfig(**_TEXT, **_EXPERTS))


_MODELS = {
    "aria": _aria,
    "biogpt": _biogpt,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granitemoe,
    "granitemoehybrid": _granitemoehybrid,
    "granitemoeshared": _granitemoeshared,
    "llama4": _llama4,
    "mistral3": _mistral3,
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_vl_moe, square": functools.partial(_qwen3_vl_moe, 32),
}


def save_family_model(name: str, folder: Path) -> Path:
    """Write a small model, as transformers saves it, and return its folder."""
    torch.manual_seed(0)
    model = _MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.08)
    model.bfloat16().save_pretrained(folder)
    return folder


def logits_of(model: Any) -> torch.Tensor:
    """Return float32 logits ``[2, 16, 128]`` of two fixed sequences."""
    tokens = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens).logits.float()
    return logits


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`."""
    return float((found - expected).norm() / expected.norm())
