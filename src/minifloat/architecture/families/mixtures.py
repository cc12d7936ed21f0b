"""Decoders with mixtures of experts. Checkpoints of most have one tensor per expert and projection."""

from __future__ import annotations

from minifloat.architecture.family import Family, FusedTensor, NativeDecoder

#: Names in a checkpoint and in transformers of the block that holds the experts.
_SPARSE_BLOCK = ((r"\.block_sparse_moe\.", ".mlp."),)
_GRANITE_EXPERTS = (
    FusedTensor("input_linear", ("experts.{}.w1", "experts.{}.w3"), transposed=False),
    FusedTensor("output_linear", ("experts.{}.w2",), transposed=False, reads_hidden=False),
)
_GPT_OSS_EXPERTS = (
    FusedTensor(
        "experts.gate_up_proj",
        ("experts.{}.gate_proj", "experts.{}.up_proj"),
        transposed=True,
        interleaved=True,
    ),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), transposed=True, reads_hidden=False),
)

FAMILIES: tuple[Family, ...] = (
    Family("Mixtral", ("mixtral",), native=NativeDecoder.MIXTURE, renames=_SPARSE_BLOCK),
    Family("Qwen mixture", ("qwen2_moe", "qwen3_moe"), native=NativeDecoder.MIXTURE, renames=()),
    Family("DeepSeek", ("deepseek_v2", "deepseek_v3"), renames=()),
    Family("DeepSeek sparse attention", ("deepseek_v32", "glm_moe_dsa")),
    Family("GLM mixture", ("glm4_moe", "glm4_moe_lite"), renames=()),
    Family("OLMoE", ("olmoe",), renames=()),
    Family("Granite mixture", ("granitemoe", "granitemoeshared"), fused_experts=_GRANITE_EXPERTS),
    Family("gpt-oss", ("gpt_oss",), fused_experts=_GPT_OSS_EXPERTS, renames=()),
)
