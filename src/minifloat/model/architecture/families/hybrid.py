"""Decoders that mix attention with linear attention or state-space layers."""

from __future__ import annotations

from minifloat.model.architecture.family import Family, Role

#: Projections of a linear-attention layer that vLLM and SGLang hold as one linear each.
_DELTA_NET = (("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")), ("in_proj_ba", ("in_proj_b", "in_proj_a")))

#: Small linears of a Mamba layer: vLLM builds them without quantization, and transformers multiplies with the weight of
#: dt_proj itself. Source: vLLM, layers/mamba/mamba_mixer.py; transformers 5.23, models/mamba/modeling_mamba.py.
_MAMBA_STEPS = ((r"\.(x_proj|dt_proj)\.weight$", Role.UNQUANTIZED_IN_SERVERS),)

FAMILIES: tuple[Family, ...] = (
    Family("Mamba", ("mamba", "falcon_mamba", "jamba"), roles=_MAMBA_STEPS),
    Family("Qwen3-Next", ("qwen3_next",), stored_fused=False, renames=()),
    Family("Qwen3.5", ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), fused=_DELTA_NET),
)
