"""Models with a vision or audio tower around a decoder.

Most keep the names of their first checkpoints on disk, which transformers renames as it loads: these rows have no
`renames`, so that its tables decide.
"""

from __future__ import annotations

from dataclasses import replace

from minifloat.model.architecture.family import Family, FusedTensor, Role

_TRANSPOSED = (
    FusedTensor("experts.gate_up_proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), transposed=True),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), transposed=True, reads_hidden=False),
)
_UPRIGHT = tuple(replace(tensor, transposed=False) for tensor in _TRANSPOSED)
#: Released files are [E, K, N]; what transformers 5 saves is [E, N, K].
_OF_BOTH_KINDS = tuple(replace(tensor, both_exist=True) for tensor in _TRANSPOSED)
_ARIA_EXPERTS = (
    FusedTensor("experts.fc1.weight", ("experts.{}.gate_proj", "experts.{}.up_proj"), transposed=True),
    FusedTensor("experts.fc2.weight", ("experts.{}.down_proj",), transposed=True, reads_hidden=False),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "Aria",
        ("aria", "aria_text"),
        fused_experts=_ARIA_EXPERTS,
        stored_fused=True,
        servers_read_single=False,
    ),
    # The vision tower has no prefix on disk.
    Family("Cosmos 3 Omni", ("cosmos3_omni",), roles=((r"^blocks\.", Role.TOWER),)),
    Family("Gemma 3", ("gemma3",)),
    # The projections between its four residual streams have four rows or columns.
    Family("Gemma 3n", ("gemma3n", "gemma3n_text"), roles=((r"\.altup\.\w+\.weight$", Role.OTHER),)),
    Family("Gemma 4", ("gemma4", "gemma4_text"), fused_experts=_UPRIGHT, stored_fused=True),
    Family(
        "Llama 4",
        ("llama4", "llama4_text"),
        fused_experts=_TRANSPOSED,
        stored_fused=True,
        transformers_splits=True,
    ),
    Family("Mistral 3", ("mistral3",)),
    Family("Qwen3-VL mixture", ("qwen3_vl_moe", "qwen3_vl_moe_text"), fused_experts=_OF_BOTH_KINDS, stored_fused=True),
)
