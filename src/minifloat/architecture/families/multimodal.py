"""Models with a vision or audio tower around a decoder.

Most keep the names of their first checkpoints on disk, which transformers renames as it loads: these rows have no
`renames`, so that its tables decide.
"""

from __future__ import annotations

from minifloat.architecture.family import Family, FusedTensor, Role

_LLAMA_4_EXPERTS = (
    FusedTensor("experts.gate_up_proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), transposed=True),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), transposed=True, reads_hidden=False),
)
_GEMMA_4_EXPERTS = (
    FusedTensor("experts.gate_up_proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), transposed=False),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), transposed=False, reads_hidden=False),
)

FAMILIES: tuple[Family, ...] = (
    Family("Gemma 3", ("gemma3",)),
    # The projections between its four residual streams have four rows or columns.
    Family("Gemma 3n", ("gemma3n", "gemma3n_text"), roles=((r"\.altup\.\w+\.weight$", Role.OTHER),)),
    Family("Gemma 4", ("gemma4", "gemma4_text"), fused_experts=_GEMMA_4_EXPERTS),
    Family("Llama 4", ("llama4", "llama4_text"), fused_experts=_LLAMA_4_EXPERTS),
    Family("Mistral 3", ("mistral3",)),
    # Files that were saved before transformers 5 are [E, K, N], later ones [E, N, K].
    Family("Qwen3-VL mixture", ("qwen3_vl_moe", "qwen3_vl_moe_text")),
)
