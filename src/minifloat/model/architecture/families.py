"""The table of families: one row states everything that minifloat knows about the models of a family.

To add a family, add a row, which tests/model/architecture/test_families.py then covers. For the native decoders add a
`NativeType` with the function of `decoder/families/`; tests/engine/test_native_families.py needs a small config of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minifloat.model.architecture.family import (
    ALL_FOLDS,
    FOLDS_WITHOUT_NORMS,
    GENERAL,
    Family,
    FoldKind,
    FusedTensor,
    NativeType,
    OuterType,
    Role,
    Rope,
    ShortConfig,
)

# Fields that config.json states, of several types.
_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "max_position_embeddings"
)
_USUAL = f"{_SIZES} hidden_act rms_norm_eps"
_WINDOWS = "layer_types sliding_window"
_QWEN2 = f"{_USUAL} {_WINDOWS} use_sliding_window"
_SPARSE = "decoder_sparse_step mlp_only_layers moe_intermediate_size"
_EXPERTS = "moe_intermediate_size num_experts num_experts_per_tok"
_LOCAL_EXPERTS = "num_local_experts num_experts_per_tok"
_DELTA = (
    "attention_bias head_dim layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim"
)
_CAPS = "attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar use_bidirectional_attention"
_GEMMA = f"{_SIZES} attention_bias head_dim hidden_activation layer_types rms_norm_eps sliding_window"
_GEMMA4 = (
    "attention_k_eq_v enable_moe_block final_logit_softcapping hidden_size_per_layer_input moe_intermediate_size "
    "num_experts num_kv_shared_layers per_layer_config top_k_experts use_bidirectional_attention use_double_wide_mlp "
    "vocab_size_per_layer_input"
)
_GRANITE = f"{_USUAL} attention_bias attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
_GROUPED = "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob"
_SCALED = "routed_scaling_factor topk_group"
_GLM_MOE = f"{_USUAL} {_GROUPED} {_SCALED} attention_bias head_dim num_experts_per_tok"
_OLMOE = "attention_bias clip_qkv norm_topk_prob num_experts num_experts_per_tok"
_HEADS_OF_LATENTS = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
_LATENT = f"{_HEADS_OF_LATENTS} rope_interleave"
_DEEPSEEK_FIELDS = f"{_USUAL} {_GROUPED} {_HEADS_OF_LATENTS} {_SCALED} attention_bias num_experts_per_tok"
_HEAD_BIASES = f"{_USUAL} attention_bias head_dim"

# Fields that config.json may leave out, and their defaults in transformers.
_LLAMA_TOKENS = (("bos_token_id", 1), ("eos_token_id", 2), ("head_dim", None))
_BIAS = (("attention_bias", False),)
_SPARSE_DEFAULTS = (("decoder_sparse_step", 1), ("mlp_only_layers", ()), ("norm_topk_prob", False))
_RENAMED_EXPERTS = (("num_local_experts", "num_experts"),)

# Tensors of fused experts.
_GATE_UP = ("experts.{}.gate_proj", "experts.{}.up_proj")
_DOWN = ("experts.{}.down_proj",)
_TRANSPOSED = (
    FusedTensor("experts.gate_up_proj", _GATE_UP, transposed=True),
    FusedTensor("experts.down_proj", _DOWN, transposed=True, reads_hidden=False),
)
_UPRIGHT = tuple(replace(tensor, transposed=False) for tensor in _TRANSPOSED)
#: Released files are [E, K, N]; what transformers 5 saves is [E, N, K].
_OF_BOTH_KINDS = tuple(replace(tensor, both_exist=True) for tensor in _TRANSPOSED)
_GPT_OSS_EXPERTS = (replace(_TRANSPOSED[0], interleaved=True), _TRANSPOSED[1])
_ARIA_EXPERTS = (
    FusedTensor("experts.fc1.weight", _GATE_UP, transposed=True),
    FusedTensor("experts.fc2.weight", _DOWN, transposed=True, reads_hidden=False),
)
_GRANITE_EXPERTS = (
    FusedTensor("input_linear.weight", ("experts.{}.w1", "experts.{}.w3")),
    FusedTensor("output_linear.weight", ("experts.{}.w2",), reads_hidden=False),
)
#: vLLM's model of the hybrid names single experts otherwise than that of its predecessors.
_GRANITE_HYBRID_EXPERTS = (
    FusedTensor("input_linear.weight", _GATE_UP),
    FusedTensor("output_linear.weight", _DOWN, reads_hidden=False),
)

#: Names in a checkpoint and in transformers of the block that holds the experts.
_SPARSE_BLOCK = ((r"\.block_sparse_moe\.", ".mlp."),)
#: Projections of a linear-attention layer that vLLM and SGLang hold as one linear each.
_DELTA_NET = (("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a")))
#: Small linears of a Mamba layer: vLLM builds them without quantization, and transformers multiplies with the weight of
#: dt_proj itself. Source: vLLM, layers/mamba/mamba_mixer.py; transformers 5.23, models/mamba/modeling_mamba.py.
_MAMBA_STEPS = ((r"\.(x_proj|dt_proj)\.weight$", Role.UNQUANTIZED_IN_SERVERS),)

_BERT = (
    *("bert", "ernie", "mobilebert", "roformer", "deberta", "deberta-v2", "fnet", "squeezebert", "megatron-bert"),
    *("big_bird", "nystromformer", "layoutlm", "yoso", "mra", "roc_bert", "nomic_bert"),
)
_ROBERTA = (
    *("roberta", "camembert", "data2vec-text", "mpnet", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    *("longformer", "ibert", "xmod"),
)


def _native(model_type: str, name: str, layer: str, stated: str, rope: Rope = "") -> NativeType:
    return NativeType(model_type, f"{name}ForCausalLM", layer, stated, rope=rope)


def _decoder(model_type: str, name: str, decoder: str, stated: str, rope: Rope = "") -> NativeType:
    return NativeType(model_type, f"{name}ForCausalLM", stated=stated, rope=rope, decoder=decoder)


_LLAMA = NativeType(
    "llama",
    "LlamaForCausalLM",
    "llama.llama",
    short=ShortConfig(defaults=(*_LLAMA_TOKENS, *_BIAS, ("mlp_bias", False)), windows="none"),
)
_MISTRAL = NativeType(
    "mistral", "MistralForCausalLM", "llama.mistral", short=ShortConfig(defaults=_LLAMA_TOKENS, windows="stated")
)
_QWEN2_TYPE = NativeType("qwen2", "Qwen2ForCausalLM", "llama.qwen2", _QWEN2, short=ShortConfig(windows="layers"))
_QWEN3_TYPE = NativeType(
    "qwen3",
    "Qwen3ForCausalLM",
    "llama.qwen3",
    f"{_QWEN2} attention_bias head_dim",
    short=ShortConfig("head_dim", _BIAS, windows="layers"),
)
_MIXTRAL = NativeType(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral.mixtral",
    short=ShortConfig(_LOCAL_EXPERTS, _LLAMA_TOKENS, theta=1_000_000.0, windows="stated"),
    w1_w2_w3=True,
)
_QWEN2_MOE = NativeType(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "mixtral.qwen2_moe",
    also=f"{_SPARSE} norm_topk_prob num_experts qkv_bias shared_expert_intermediate_size",
    short=ShortConfig(
        f"{_EXPERTS} shared_expert_intermediate_size",
        (*_SPARSE_DEFAULTS, ("qkv_bias", True)),
        windows="layers",
        no_window=0,
    ),
)
_QWEN3_MOE = NativeType(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "mixtral.qwen3_moe",
    f"{_USUAL} {_LOCAL_EXPERTS} {_SPARSE} attention_bias norm_topk_prob sliding_window use_sliding_window",
    also="num_experts",
    renamed=_RENAMED_EXPERTS,
    short=ShortConfig(f"{_EXPERTS} head_dim", (*_SPARSE_DEFAULTS, *_BIAS)),
)
_QWEN3_VL_MOE = NativeType(
    "qwen3_vl_moe_text",
    "Qwen3VLMoeTextModel",
    "mixtral.qwen3_vl_moe",
    f"{_HEAD_BIASES} {_LOCAL_EXPERTS} {_SPARSE} sliding_window",
    also="norm_topk_prob num_experts",
    renamed=_RENAMED_EXPERTS,
)
_GPT_OSS = NativeType(
    "gpt_oss",
    "GptOssForCausalLM",
    "mixtral.gpt_oss",
    f"{_HEAD_BIASES} {_LOCAL_EXPERTS} {_WINDOWS} swiglu_limit",
    newer=(("swiglu_alpha", 1.702),),
)
_GEMMA4_TEXT = NativeType(
    "gemma4_text",
    "Gemma4ForCausalLM",
    decoder="gemma4.gemma4",
    stated=f"{_GEMMA} {_GEMMA4}",
    also="global_head_dim num_global_key_value_heads",
    rope="by layer type",
)
_DEEPSEEK = (
    NativeType(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        "deepseek.deepseek_v2",
        f"{_DEEPSEEK_FIELDS} mlp_bias topk_method",
    ),
    NativeType(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "deepseek.deepseek_v3",
        f"{_DEEPSEEK_FIELDS} num_nextn_predict_layers rope_interleave",
    ),
)
_GLM_MIXTURES = (
    NativeType(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        "deepseek.glm4_moe",
        f"{_GLM_MOE} num_nextn_predict_layers use_qk_norm",
        rope="partial",
    ),
    NativeType(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        "deepseek.glm4_moe_lite",
        also=f"{_GROUPED} {_LATENT} {_SCALED} mlp_layer_types",
    ),
)
_QWEN3_5 = (
    OuterType("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    NativeType(
        "qwen3_5_text", "Qwen3_5ForCausalLM", decoder="mixtral.qwen3_5", stated=f"{_USUAL} {_DELTA}", rope="partial"
    ),
    OuterType("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    NativeType(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        decoder="mixtral.qwen3_5_moe",
        stated=f"{_USUAL} {_DELTA} {_EXPERTS} shared_expert_intermediate_size".replace(" intermediate_size", ""),
        rope="partial",
    ),
)
_QWEN3_NEXT = NativeType(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    decoder="mixtral.qwen3_next",
    stated=f"{_USUAL} {_DELTA} {_EXPERTS} {_SPARSE} norm_topk_prob shared_expert_intermediate_size",
    rope="partial",
)


def _dense(name: str, *types: str | NativeType, folds: frozenset[FoldKind] = ALL_FOLDS) -> Family:
    """Return the row of decoders with one MLP per layer, whose checkpoints have the names of transformers' modules."""
    return Family(name, types, renames=(), folds=folds)


#: All rows.
FAMILIES: tuple[Family, ...] = (
    _dense("Llama", _LLAMA, _MISTRAL),
    _dense(
        "Ministral", _native("ministral", "Ministral", "llama.ministral", f"{_USUAL} {_WINDOWS} head_dim"), "ministral3"
    ),
    _dense("Qwen dense", _QWEN2_TYPE, _QWEN3_TYPE),
    _dense(
        "Gemma text",
        _decoder("gemma", "Gemma", "gemma.gemma", f"{_HEAD_BIASES} use_bidirectional_attention"),
        _decoder("gemma2", "Gemma2", "gemma.gemma2", f"{_GEMMA} {_CAPS}"),
        _decoder("gemma3_text", "Gemma3", "gemma.gemma3", f"{_GEMMA} {_CAPS}", "by layer type"),
        folds=FOLDS_WITHOUT_NORMS,
    ),
    _dense("Granite", _decoder("granite", "Granite", "llama.granite", f"{_GRANITE} mlp_bias")),
    _dense(
        "GLM",
        _native("glm", "Glm", "deepseek.glm", _HEAD_BIASES, "partial"),
        _native("glm4", "Glm4", "deepseek.glm4", _HEAD_BIASES, "partial"),
    ),
    _dense(
        "OLMo",
        _decoder("olmo", "Olmo", "llama.olmo", f"{_SIZES} hidden_act attention_bias clip_qkv"),
        _native("olmo2", "Olmo2", "llama.olmo2", f"{_USUAL} attention_bias"),
        _native("olmo3", "Olmo3", "llama.olmo3", f"{_USUAL} {_WINDOWS} attention_bias", "by layer type"),
        folds=FOLDS_WITHOUT_NORMS,
    ),
    _dense(
        "Phi-3",
        _native(
            "phi3", "Phi3", "deepseek.phi3", f"{_USUAL} original_max_position_embeddings sliding_window", "partial"
        ),
    ),
    _dense(
        "Cohere",
        _decoder(
            "cohere",
            "Cohere",
            "cohere.cohere",
            f"{_SIZES} hidden_act attention_bias layer_norm_eps logit_scale use_qk_norm",
        ),
        _decoder(
            "cohere2",
            "Cohere2",
            "cohere.cohere2",
            f"{_SIZES} {_WINDOWS} hidden_act attention_bias head_dim layer_norm_eps logit_scale",
        ),
        folds=frozenset(),
    ),
    _dense(
        "EXAONE 4",
        _native("exaone4", "Exaone4", "llama.exaone4", f"{_USUAL} {_WINDOWS} head_dim"),
        folds=FOLDS_WITHOUT_NORMS,
    ),
    _dense(
        "SmolLM 3", _native("smollm3", "SmolLM3", "llama.smollm3", f"{_QWEN2} attention_bias mlp_bias no_rope_layers")
    ),
    _dense("Seed-OSS", _native("seed_oss", "SeedOss", "llama.seed_oss", f"{_HEAD_BIASES} attention_out_bias mlp_bias")),
    _dense(
        "StarCoder 2",
        _decoder(
            "starcoder2", "Starcoder2", "cohere.starcoder2", f"{_SIZES} hidden_act norm_epsilon sliding_window use_bias"
        ),
    ),
    _dense(
        "Nemotron",
        _decoder(
            "nemotron",
            "Nemotron",
            "cohere.nemotron",
            f"{_SIZES} hidden_act attention_bias head_dim mlp_bias norm_eps",
            "partial",
        ),
        folds=frozenset(),
    ),
    _dense(
        "StableLM",
        _decoder(
            "stablelm",
            "StableLm",
            "cohere.stablelm",
            f"{_SIZES} hidden_act layer_norm_eps qk_layernorm use_parallel_residual use_qkv_bias",
            "partial",
        ),
        folds=frozenset(),
    ),
    _dense("ERNIE 4.5", _native("ernie4_5", "Ernie4_5", "llama.ernie", f"{_USUAL} head_dim use_bias")),
    _dense("Helium", _native("helium", "Helium", "llama.helium", f"{_HEAD_BIASES} mlp_bias")),
    _dense("Hunyuan dense", "hunyuan_v1_dense"),
    Family("GPT-2", ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), renames=(), conv1d=True),
    # Mixtures of experts. Checkpoints of most have one tensor per expert and projection.
    Family("Mixtral", (_MIXTRAL,), stored_fused=False, renames=_SPARSE_BLOCK, folds=ALL_FOLDS),
    Family("Qwen mixture", (_QWEN2_MOE, _QWEN3_MOE), stored_fused=False, renames=(), folds=ALL_FOLDS),
    Family("DeepSeek", _DEEPSEEK, stored_fused=False, renames=()),
    Family("DeepSeek sparse attention", ("deepseek_v32", "glm_moe_dsa")),
    # vLLM 0.32.0, models/deepseek_v4/quant_config.py: DeepseekV4FP8Config.expert_dtype.
    Family("DeepSeek-V4", ("deepseek_v4",), states_expert_dtype=True),
    Family("GLM mixture", _GLM_MIXTURES, stored_fused=False, renames=()),
    Family(
        "OLMoE",
        (
            _native(
                "olmoe",
                "Olmoe",
                "mixtral.olmoe",
                f"{_USUAL} {_OLMOE}",
            ),
        ),
        stored_fused=False,
        renames=(),
        folds=ALL_FOLDS,
    ),
    Family(
        "Granite mixture",
        (
            _decoder("granitemoe", "GraniteMoe", "llama.granite_moe", f"{_GRANITE} {_LOCAL_EXPERTS}"),
            _decoder(
                "granitemoeshared",
                "GraniteMoeShared",
                "llama.granite_moe",
                f"{_GRANITE} {_LOCAL_EXPERTS} shared_intermediate_size",
            ),
        ),
        fused_experts=_GRANITE_EXPERTS,
        stored_fused=True,
    ),
    Family("Granite hybrid", ("granitemoehybrid",), fused_experts=_GRANITE_HYBRID_EXPERTS, stored_fused=True),
    Family(
        "gpt-oss",
        (_GPT_OSS,),
        fused_experts=_GPT_OSS_EXPERTS,
        stored_fused=True,
        servers_read_single=False,
        renames=(),
    ),
    # Decoders that mix attention with linear attention or state-space layers.
    Family("Mamba", ("mamba", "falcon_mamba", "jamba"), roles=_MAMBA_STEPS),
    Family("Qwen3-Next", (_QWEN3_NEXT,), stored_fused=False, renames=()),
    Family("Qwen3.5", _QWEN3_5, fused=_DELTA_NET),
    # Models with a vision or audio tower around a decoder.
    Family("Aria", ("aria", "aria_text"), fused_experts=_ARIA_EXPERTS, stored_fused=True, servers_read_single=False),
    # The vision tower has no prefix on disk.
    Family("Cosmos 3 Omni", ("cosmos3_omni",), roles=((r"^blocks\.", Role.TOWER),)),
    Family("Gemma 3", (OuterType("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),)),
    # The projections between its four residual streams have four rows or columns.
    Family("Gemma 3n", ("gemma3n", "gemma3n_text"), roles=((r"\.altup\.\w+\.weight$", Role.OTHER),)),
    Family(
        "Gemma 4",
        (OuterType("gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"), _GEMMA4_TEXT),
        fused_experts=_UPRIGHT,
        stored_fused=True,
    ),
    Family(
        "Llama 4",
        ("llama4", "llama4_text"),
        fused_experts=_TRANSPOSED,
        stored_fused=True,
        transformers_splits=True,
    ),
    Family("Mistral 3", (OuterType("mistral3", "Mistral3ForConditionalGeneration", "mistral"),)),
    Family(
        "Qwen3-VL mixture",
        (OuterType("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"), _QWEN3_VL_MOE),
        fused_experts=_OF_BOTH_KINDS,
        stored_fused=True,
    ),
    # Encoders without a causal mask, as `encoder.layer.N`, and decoders whose head has another name than lm_head.
    Family("BERT", _BERT, renames=(), heads=("cls.predictions.decoder",)),
    Family("RoBERTa", _ROBERTA, renames=(), heads=("lm_head.decoder",)),
    Family("ELECTRA", ("electra", "convbert"), renames=(), heads=("generator_lm_head",)),
    Family("DistilBERT", ("distilbert",), renames=(), heads=("vocab_projector",)),
    Family("ModernBERT", ("modernbert",), renames=(), heads=("decoder",)),
    Family("ModernBERT decoder", ("modernbert-decoder",), renames=(), heads=("decoder",)),
    Family("BioGPT", ("biogpt",), renames=(), heads=("output_projection",)),
    Family("GPT-NeoX Japanese", ("gpt_neox_japanese",), renames=(), heads=("embed_out",)),
)
#: Models that the decoders run, and for whose tensors the general rules hold.
_BY_GENERAL_RULES = replace(
    GENERAL,
    types=(
        _native("arcee", "Arcee", "llama.arcee", f"{_HEAD_BIASES} mlp_bias"),
        OuterType("llava", "LlavaForConditionalGeneration", "llama"),
        OuterType("llava_next", "LlavaNextForConditionalGeneration", "llama"),
        OuterType("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
        NativeType("qwen2_vl_text", "Qwen2VLTextModel", "llama.qwen2", _QWEN2),
        OuterType("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
        NativeType("qwen2_5_vl_text", "Qwen2_5_VLTextModel", "llama.qwen2", _QWEN2),
        OuterType("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
        NativeType("qwen3_vl_text", "Qwen3VLTextModel", "llama.qwen3", _HEAD_BIASES),
        _native("dots1", "Dots1", "deepseek.dots1", f"{_GLM_MOE} {_WINDOWS}"),
        NativeType("youtu", "YoutuForCausalLM", "deepseek.youtu", also=f"{_LATENT} embedding_initializer_range"),
        NativeType(
            "minicpm3",
            "MiniCPM3ForCausalLM",
            decoder="deepseek.minicpm3",
            also=f"{_LATENT} dim_model_base scale_depth scale_emb",
        ),
        NativeType(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            "deepseek.minimax_m2",
            f"{_USUAL} {_LOCAL_EXPERTS} head_dim",
            rope="partial",
            w1_w2_w3=True,
        ),
    ),
)
_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
_TYPES = [entry for family in (*FAMILIES, _BY_GENERAL_RULES) for entry in family.types]
#: ``model_type`` -> what runs its text model natively.
NATIVE = {entry.model_type: entry for entry in _TYPES if isinstance(entry, NativeType)}
#: ``model_type`` of a model around a text model -> its class. Without images, sound and videos, each computes what its
#: text model alone does: tokens see earlier tokens only, and all coordinates of a position are equal.
OUTER = {entry.model_type: entry for entry in _TYPES if isinstance(entry, OuterType)}


def unknown_family_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for the user if there is no row for a model; else nothing."""
    family = family_of(config)
    if family.known:
        return ()
    return (
        f"minifloat has no description of model_type {family.name!r}: which tensors are quantized, what servers fuse "
        "and how experts are stored follow from the general rules. Check the table of tensors.",
    )


def family_of(config: Mapping[str, Any]) -> Family:
    row = _BY_TYPE.get(str(config.get("model_type")))
    if row is not None:
        return row
    nested = config.get("text_config")
    row = _BY_TYPE.get(str(nested.get("model_type"))) if isinstance(nested, dict) else None
    if row is not None:
        return replace(row, renames=None)  # the outer model changes the names of modules
    return replace(GENERAL, name=str(config.get("model_type", GENERAL.name)))
