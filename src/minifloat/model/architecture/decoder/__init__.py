"""What the native decoders compute for each family of models, decided from its config, without torch.

`decoder_layout` turns a config into a `DecoderLayout`, or raises `NotNative` with the reason why transformers' code
runs the model. To add a family: a function in `families/` that returns its layout, and a row here;
tests/engine/test_native_families.py then needs a small config of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from minifloat.kernels.decoder_layout import DecoderLayout, LayerLayout, NotNative
from minifloat.model.architecture.decoder import parts
from minifloat.model.architecture.decoder.families import (
    cohere,
    deepseek,
    gemma,
    gemma4,
    glm,
    granite,
    llama,
    mixtral,
    olmo,
    qwen_next,
)
from minifloat.model.architecture.decoder.features import why_not_on_device

__all__ = [
    "NATIVE",
    "DecoderLayout",
    "NativeFamily",
    "NotNative",
    "decoder_layout",
    "why_not_on_device",
    "why_not_type",
]

#: Fields of configs that the layouts of all families obey, or that change no result.
_COMMON = (
    "attention_bias attention_dropout bos_token_id embd_pdrop embedding_dropout eos_token_id head_dim hidden_act "
    "hidden_activation hidden_dropout hidden_size initializer_range intermediate_size layer_types "
    "max_position_embeddings max_window_layers mlp_bias no_rope_layer_interval num_attention_heads "
    "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts num_mtp_layers "
    "output_router_logits pad_token_id pretraining_tp resid_pdrop residual_dropout rms_norm_eps rope_parameters "
    "router_aux_loss_coef router_jitter_noise sliding_window sliding_window_pattern tie_word_embeddings use_cache "
    "use_sliding_window vocab_size"
)
_GROUPED = "first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob"
_LATENT = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim rope_interleave v_head_dim"
_SPARSE = "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts"
_GRANITE = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier"
_DELTA = "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim"
_SHARED = "moe_intermediate_size num_experts shared_expert_intermediate_size"
_CAPS = "attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar use_bidirectional_attention"
_GEMMA4 = (
    "attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim hidden_size_per_layer_input "
    "moe_intermediate_size num_experts num_global_key_value_heads num_kv_shared_layers top_k_experts "
    "use_bidirectional_attention use_double_wide_mlp vocab_size_per_layer_input"
)


@dataclass(frozen=True)
class NativeFamily:
    """A family that the decoder of CPUs runs; what that of GPUs lacks, `features.py` says.

    Attributes:
        layer: Returns a layer, where nothing else of the decoder is special.
        fields: Fields of configs that it obeys, or that change no result, beside `_COMMON`.
        decoder: Returns the whole decoder where more than its layers is special.
    """

    architecture: str
    layer: Callable[[Any, int], LayerLayout] | None = None
    fields: str = ""
    renamings: tuple[tuple[str, str], ...] = ()
    decoder: Callable[[Any], DecoderLayout] | None = None

    def layout(self, config: Any) -> DecoderLayout:
        """Return what a decoder computes for a model."""
        if self.layer is None:
            assert self.decoder is not None, "a family has a layer or a decoder"
            return self.decoder(config)
        return replace(parts.decoder(config, self.layer), renamings=self.renamings)

    def unknown_field(self, config: Any) -> str:
        """Return a field that the config's class declares, that is not at its default, and that the layout ignores.

        Newer releases of transformers add fields, which may change what a model computes.
        """
        known = set(f"{_COMMON} {self.fields}".split())
        own = getattr(type(config), "__dataclass_fields__", {})
        inherited = {name for base in type(config).__mro__[1:] for name in _base_fields(base)}
        for name, field in own.items():
            if name not in known | inherited and getattr(config, name, field.default) != field.default:
                return str(name)
        return ""


def _base_fields(base: type) -> tuple[str, ...]:
    """Return the fields of transformers' base class of all configs; those of other classes are a family's own."""
    return tuple(getattr(base, "__dataclass_fields__", ())) if base.__name__ == "PreTrainedConfig" else ()


#: ``model_type`` -> what runs it natively.
NATIVE: dict[str, NativeFamily] = {
    "llama": NativeFamily("LlamaForCausalLM", llama.llama),
    "mistral": NativeFamily("MistralForCausalLM", llama.mistral),
    "ministral": NativeFamily("MinistralForCausalLM", llama.ministral),
    "qwen2": NativeFamily("Qwen2ForCausalLM", llama.qwen2),
    "qwen3": NativeFamily("Qwen3ForCausalLM", llama.qwen3),
    "seed_oss": NativeFamily("SeedOssForCausalLM", llama.seed_oss, "attention_out_bias"),
    "smollm3": NativeFamily("SmolLM3ForCausalLM", llama.smollm3, "no_rope_layers"),
    "arcee": NativeFamily("ArceeForCausalLM", llama.arcee),
    "helium": NativeFamily("HeliumForCausalLM", llama.helium),
    "ernie4_5": NativeFamily("Ernie4_5ForCausalLM", llama.ernie, "use_bias"),
    "mixtral": NativeFamily("MixtralForCausalLM", mixtral.mixtral, renamings=parts.W1_W2_W3),
    "qwen2_moe": NativeFamily(
        "Qwen2MoeForCausalLM", mixtral.qwen2_moe, f"{_SPARSE} qkv_bias shared_expert_intermediate_size"
    ),
    "qwen2_vl_text": NativeFamily("Qwen2VLTextModel", llama.qwen2),
    "qwen2_5_vl_text": NativeFamily("Qwen2_5_VLTextModel", llama.qwen2),
    "qwen3_vl_text": NativeFamily("Qwen3VLTextModel", llama.qwen3),
    "qwen3_vl_moe_text": NativeFamily("Qwen3VLMoeTextModel", mixtral.qwen3_vl_moe, _SPARSE),
    "qwen3_moe": NativeFamily("Qwen3MoeForCausalLM", mixtral.qwen3_moe, _SPARSE),
    "qwen3_next": NativeFamily(
        "Qwen3NextForCausalLM", decoder=qwen_next.qwen3_next, fields=f"{_DELTA} {_SHARED} {_SPARSE}"
    ),
    "qwen3_5_text": NativeFamily("Qwen3_5ForCausalLM", decoder=qwen_next.qwen3_5, fields=_DELTA),
    "qwen3_5_moe_text": NativeFamily(
        "Qwen3_5MoeForCausalLM", decoder=qwen_next.qwen3_5_moe, fields=f"{_DELTA} {_SHARED}"
    ),
    "olmoe": NativeFamily("OlmoeForCausalLM", mixtral.olmoe, "clip_qkv norm_topk_prob num_experts"),
    "gpt_oss": NativeFamily("GptOssForCausalLM", mixtral.gpt_oss, "swiglu_alpha swiglu_limit"),
    "gemma": NativeFamily("GemmaForCausalLM", decoder=gemma.gemma, fields="use_bidirectional_attention"),
    "gemma2": NativeFamily("Gemma2ForCausalLM", decoder=gemma.gemma2, fields=_CAPS),
    "gemma3_text": NativeFamily("Gemma3ForCausalLM", decoder=gemma.gemma3, fields=_CAPS),
    "gemma4_text": NativeFamily("Gemma4ForCausalLM", decoder=gemma4.gemma4, fields=_GEMMA4),
    "phi3": NativeFamily("Phi3ForCausalLM", glm.phi3, "original_max_position_embeddings"),
    "glm": NativeFamily("GlmForCausalLM", glm.glm),
    "glm4": NativeFamily("Glm4ForCausalLM", glm.glm4),
    "glm4_moe": NativeFamily(
        "Glm4MoeForCausalLM", glm.glm4_moe, f"{_GROUPED} routed_scaling_factor topk_group use_qk_norm"
    ),
    "dots1": NativeFamily("Dots1ForCausalLM", glm.dots1, f"{_GROUPED} routed_scaling_factor topk_group"),
    "deepseek_v2": NativeFamily(
        "DeepseekV2ForCausalLM",
        deepseek.deepseek_v2,
        f"{_GROUPED} {_LATENT} routed_scaling_factor topk_group topk_method",
    ),
    "deepseek_v3": NativeFamily(
        "DeepseekV3ForCausalLM", deepseek.deepseek_v3, f"{_GROUPED} {_LATENT} routed_scaling_factor topk_group"
    ),
    "glm4_moe_lite": NativeFamily(
        "Glm4MoeLiteForCausalLM",
        deepseek.glm4_moe_lite,
        f"{_GROUPED} {_LATENT} mlp_layer_types routed_scaling_factor topk_group",
    ),
    "youtu": NativeFamily("YoutuForCausalLM", deepseek.youtu, f"{_LATENT} embedding_initializer_range"),
    "minicpm3": NativeFamily(
        "MiniCPM3ForCausalLM", decoder=deepseek.minicpm3, fields=f"{_LATENT} dim_model_base scale_depth scale_emb"
    ),
    "minimax_m2": NativeFamily("MiniMaxM2ForCausalLM", glm.minimax_m2, renamings=parts.W1_W2_W3),
    "granite": NativeFamily("GraniteForCausalLM", decoder=granite.granite, fields=_GRANITE),
    "granitemoe": NativeFamily("GraniteMoeForCausalLM", decoder=granite.granite_moe, fields=_GRANITE),
    "granitemoeshared": NativeFamily(
        "GraniteMoeSharedForCausalLM", decoder=granite.granite_moe, fields=f"{_GRANITE} shared_intermediate_size"
    ),
    "olmo": NativeFamily("OlmoForCausalLM", decoder=olmo.olmo, fields="clip_qkv"),
    "olmo2": NativeFamily("Olmo2ForCausalLM", olmo.olmo2),
    "olmo3": NativeFamily("Olmo3ForCausalLM", olmo.olmo3),
    "exaone4": NativeFamily("Exaone4ForCausalLM", olmo.exaone4),
    "cohere": NativeFamily("CohereForCausalLM", decoder=cohere.cohere, fields="layer_norm_eps logit_scale use_qk_norm"),
    "cohere2": NativeFamily("Cohere2ForCausalLM", decoder=cohere.cohere2, fields="layer_norm_eps logit_scale"),
    "starcoder2": NativeFamily("Starcoder2ForCausalLM", decoder=cohere.starcoder2, fields="norm_epsilon use_bias"),
    "nemotron": NativeFamily("NemotronForCausalLM", decoder=cohere.nemotron, fields="norm_eps"),
    "stablelm": NativeFamily(
        "StableLmForCausalLM",
        decoder=cohere.stablelm,
        fields="layer_norm_eps qk_layernorm use_parallel_residual use_qkv_bias",
    ),
}


def why_not_type(model_type: str) -> str:
    """Return why no decoder supports the ``model_type`` of a text model; empty if that of CPUs does."""
    return "" if model_type in NATIVE else f"its model_type is {model_type!r}, not one of {', '.join(NATIVE)}"


def decoder_layout(config: Any) -> DecoderLayout:
    """Return what a decoder computes for a model."""
    reason = why_not_type(config.model_type)
    if reason:
        raise NotNative(reason)
    family = NATIVE[config.model_type]
    field = family.unknown_field(config)
    if field:
        raise NotNative(f"its config sets {field!r}, which minifloat does not know")
    return family.layout(config)
