"""Decoders with mixtures of experts. Checkpoints of most have one tensor per expert and projection."""

from __future__ import annotations

from minifloat.model.architecture.family import ALL_FOLDS, Family, FusedTensor

#: Names in a checkpoint and in transformers of the block that holds the experts.
_SPARSE_BLOCK = ((r"\.block_sparse_moe\.", ".mlp."),)
_GRANITE_EXPERTS = (
    FusedTensor("input_linear.weight", ("experts.{}.w1", "experts.{}.w3")),
    FusedTensor("output_linear.weight", ("experts.{}.w2",), reads_hidden=False),
)
#: vLLM's model of the hybrid names single experts otherwise than that of its predecessors.
_GRANITE_HYBRID_EXPERTS = (
    FusedTensor("input_linear.weight", ("experts.{}.gate_proj", "experts.{}.up_proj")),
    FusedTensor("output_linear.weight", ("experts.{}.down_proj",), reads_hidden=False),
)
_GPT_OSS_EXPERTS = (
    FusedTensor(
        "experts.gate_up_proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), transposed=True, interleaved=True
    ),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), transposed=True, reads_hidden=False),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "Mixtral",
        ("mixtral",),
        stored_fused=False,
        renames=_SPARSE_BLOCK,
        folds=ALL_FOLDS,
    ),
    Family(
        "Qwen mixture",
        ("qwen2_moe", "qwen3_moe"),
        stored_fused=False,
        renames=(),
        folds=ALL_FOLDS,
    ),
    Family("DeepSeek", ("deepseek_v2", "deepseek_v3"), stored_fused=False, renames=()),
    Family("DeepSeek sparse attention", ("deepseek_v32", "glm_moe_dsa")),
    # vLLM 0.32.0, models/deepseek_v4/quant_config.py: DeepseekV4FP8Config.expert_dtype.
    Family("DeepSeek-V4", ("deepseek_v4",), states_expert_dtype=True),
    Family("GLM mixture", ("glm4_moe", "glm4_moe_lite"), stored_fused=False, renames=()),
    Family("OLMoE", ("olmoe",), stored_fused=False, renames=(), folds=ALL_FOLDS),
    Family("Granite mixture", ("granitemoe", "granitemoeshared"), fused_experts=_GRANITE_EXPERTS, stored_fused=True),
    Family("Granite hybrid", ("granitemoehybrid",), fused_experts=_GRANITE_HYBRID_EXPERTS, stored_fused=True),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        fused_experts=_GPT_OSS_EXPERTS,
        stored_fused=True,
        servers_read_single=False,
        renames=(),
    ),
)
