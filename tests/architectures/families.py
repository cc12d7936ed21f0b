"""What the small configs of some architectures need beyond the general rules of `small_configs`.

A value is nested as the config is.
"""

from __future__ import annotations

from typing import Any

from small_configs import EXPERT, EXPERTS, HEADS, HIDDEN, PER_TOKEN

_FOUR_HEADS = {"num_key_value_heads": HEADS}
_HEAD_DIM = {"head_dim": HIDDEN // HEADS}
_GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "global_head_dim": 32}
_GEMMA4_MOE = {
    **_GEMMA4,
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": PER_TOKEN,
    "moe_intermediate_size": EXPERT,
}
_MOE_AND_SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": PER_TOKEN}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}

_CROSS_ATTENTION = "the decoder of an encoder-decoder model: its cross-attention never runs on text alone"
_NEEDS_IMAGE = "the class does not answer text alone"
#: Model types that the matrix does not have, and why.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        (
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "marian",
            "mbart",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
            "musicgen",
            "musicgen_melody",
            "t5gemma2",
            "udop",
            "vision-encoder-decoder",
        ),
        _CROSS_ATTENTION,
    ),
    **dict.fromkeys(
        (
            "blip",
            "blip-2",
            "idefics",
            "instructblip",
            "instructblipvideo",
            "kosmos-2",
            "kosmos-2.5",
            "pi0",
            "pix2struct",
            "pp_chart2table",
            "pp_formulanet",
            "florence2",
            "evolla",
        ),
        _NEEDS_IMAGE,
    ),
    "cpmant": "the model puts tokens of its own before the text",
    "shieldgemma2": "a classifier of images",
    **dict.fromkeys(("gemma3n", "fast_vlm", "perception_lm"), "its vision tower needs the package timm"),
}

_WITH_SECTIONS = (
    "glm46v",
    "glm4v",
    "glm_ocr",
    "glmga",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
)
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
_HALF_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 3, 3],
    }
}
_ONE_ROPE = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}}

#: Model type -> the fields of its small config.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "dots1": {**_MOE_AND_SHARED, "first_k_dense_replace": 1, "n_group": 1},
    "dots3_note": {"text_config": _FOUR_HEADS},
    "dots3_note_text": _FOUR_HEADS,
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 256,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4_MOE,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32},
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": {**_HEAD_DIM, "num_experts": EXPERTS, "moe_topk": PER_TOKEN},
    "hunyuan_vl": {"text_config": _HEAD_DIM},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4": {
        "text_config": {"layer_types": ["chunked_attention", "full_attention"], "num_hidden_layers": 2},
        "vision_config": {"projector_output_dim": 64, "projector_input_dim": 64, "vision_output_dim": 64},
    },
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 2},
    "ministral": _HEAD_DIM,
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": _INDEXER | {"hc_lowrank": 16, "ngram_vocab_size_base": 100, "split_ngram_parts": 2},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "lru_width": HIDDEN,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    },
    "reformer": {"is_decoder": True},
    "zamba": {"num_hidden_layers": 4},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "bailing_hybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
    },
    "glm5_next": {"text_config": _FOUR_HEADS},
    "cohere2_vision": {"alignment_intermediate_size": 64},
    **{name: {"text_config": _SECTIONS} for name in _WITH_SECTIONS},
    "glm4v_moe": {"text_config": _HALF_SECTIONS},
    "cohere_compass_text": _ONE_ROPE,
    "cohere_compass": {"text_config": _ONE_ROPE},
    "cosmos3_edge": {"text_config": _SECTIONS},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, **_MOE_AND_SHARED},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": EXPERT, "moe_num_experts": EXPERTS, "moe_top_k": PER_TOKEN},
    },
    "step3p7": {"text_config": {"sliding_window": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": HIDDEN}},
}
