"""Rules about checkpoints that vLLM refuses, degrades or answers wrongly on one GPU or CPU.

The rules about tensor parallelism are in `vllm_parallel`.
"""

from __future__ import annotations

import functools

from minifloat.deploy.check import conditions, expert_conditions
from minifloat.deploy.check.conditions import kinds
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules import unquantized, vllm_parallel
from minifloat.deploy.check.rules.machines import ALL, BEFORE_ADA, BEFORE_BLACKWELL, BLACKWELL, CPUS, FNUZ, WITHOUT_AMX
from minifloat.deploy.check.rules.shared import (
    EXPERTS_WEIGHT_ONLY_FP8,
    HEAD_UNQUANTIZED,
    NVFP4_BEFORE_BLACKWELL,
    USE_BLOCK,
    VLLM_CPU,
    VLLM_KERNEL_LISTS,
)
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, Kind
from minifloat.deploy.check.vllm_plugin import NAME as PLUGIN
from minifloat.model.layouts import compressed_tensors, fp8, modelopt

_SCHEME_CHOICE = "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts"
_ON_CPU = (
    f"serve it with minifloat, or in vLLM with minifloat's plugin (--plugin {PLUGIN}), or {USE_BLOCK} for a processor "
    "with AMX"
)
#: Head sizes that attention on a CPU is compiled for.
_CPU_HEAD_SIZES = frozenset({*range(32, 257, 32), 48, 80, 112, 512})

RULES: tuple[LoadingRule, ...] = (
    *vllm_parallel.RULES,
    *unquantized.VLLM,
    LoadingRule(
        name="vllm-weight-only-fp8",
        hardware=(*CPUS, *FNUZ),
        verdict=LoadVerdict.REFUSED,
        condition=kinds(Kind.FP8_WEIGHT_ONLY, layout=compressed_tensors.NAME),
        problem=(
            "there is no kernel for FP8 weights with 16-bit inputs (W8A16), "
            "the form in which fp8-static without calibration is stored"
        ),
        cure=_ON_CPU,
        source=f"{VLLM_KERNEL_LISTS}: _POSSIBLE_WFP8A16_KERNELS is empty for CPU and ROCm",
        confirmed_with=f"{VLLM_CPU} (CPU)",
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-expert-dtype",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=expert_conditions.experts_taken_for_mxfp4,
        problem="the experts are FP8, and vLLM takes them for MXFP4 because the config has no expert_dtype",
        cure='add "expert_dtype": "fp8" to config.json, as minifloat quantize does',
        source="models/deepseek_v4/quant_config.py: DeepseekV4FP8Config.expert_dtype is fp4 where the config has none",
    ),
    LoadingRule(
        name="vllm-cpu-amx",
        hardware=WITHOUT_AMX,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.needs_amx,
        problem=(
            "the kernels for FP8 blocks and for gpt-oss' experts are made of AMX instructions, which this CPU lacks"
        ),
        cure=(
            f"serve it with minifloat, or linears in vLLM with minifloat's plugin (--plugin {PLUGIN}), or on a "
            "processor with AMX (Xeon since Sapphire Rapids)"
        ),
        source="kernels/linear/scaled_mm/cpu.py, layers/fused_moe/experts/cpu_moe.py: torch.cpu._is_amx_tile_supported",
        confirmed_with=VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-cpu-head-size",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.head_size_not_in, sizes=_CPU_HEAD_SIZES),
        problem="it loads, and the first forward pass fails: attention on a CPU is not compiled for heads of this size",
        cure="serve it with minifloat",
        source="v1/attention/backends/cpu_attn.py: get_supported_head_sizes, and 48, which is compiled too",
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-cpu-static",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(Kind.FP8_STATIC),
        problem=(
            "a kernel is chosen, and the first forward pass fails: static_scaled_fp8_quant takes no arguments in this "
            "build"
        ),
        cure=_ON_CPU,
        source=(
            "kernels/linear/scaled_mm/cpu.py: CPUFp8PerTensorScaledMMLinearKernel, whose op to round inputs is not "
            "built"
        ),
        confirmed_with=VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-cpu-dynamic",
        hardware=CPUS,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.FP8_DYNAMIC),
        problem="torch._scaled_mm is the only kernel that fits, and it is hundreds of times slower than BF16",
        cure=_ON_CPU,
        source=(
            f"{VLLM_KERNEL_LISTS}: ChannelWiseTorchFP8ScaledMMLinearKernel is the only one that fits; speed: our notes "
            "on 0.32"
        ),
        confirmed_with=VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-cpu-small-formats",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(*MXFP8_KINDS, Kind.NVFP4, Kind.NVFP4_W4A4),
        problem="vLLM has no kernel for this format on a CPU",
        cure=_ON_CPU,
        source=(
            f"{VLLM_KERNEL_LISTS}: _POSSIBLE_MXFP4_KERNELS, _POSSIBLE_MXFP8_KERNELS and _POSSIBLE_NVFP4_KERNELS have "
            "no CPU"
        ),
        confirmed_with=VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-cpu-mxfp4",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(*MXFP4_KINDS, layout=compressed_tensors.NAME),
        problem="MXFP4 linears have no kernel on a CPU (gpt-oss' fused experts have one)",
        cure=_ON_CPU,
        source=f"{VLLM_KERNEL_LISTS}: _POSSIBLE_MXFP4_KERNELS has no CPU",
        confirmed_with=VLLM_CPU,
        lifted_by=PLUGIN,
    ),
    LoadingRule(
        name="vllm-cpu-block-size",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.not_whole_blocks_of_128_columns,
        problem="the kernel takes blocks of 128 columns only",
        cure="quantize the original again with --scheme fp8-block",
        source="kernels/linear/scaled_mm/cpu.py: CPUFp8BlockScaledMMKernel.can_implement",
        confirmed_with=f"{VLLM_CPU} (blocks of 32x32)",
    ),
    LoadingRule(
        name="vllm-dense-mxfp4",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.dense_mxfp4,
        problem=(
            "quant_method mxfp4 is for gpt-oss' fused experts: linears are built unquantized and the codes have no "
            "place"
        ),
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="quantization/mxfp4.py: Mxfp4Config.get_quant_method, linears are left unquantized",
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-ampere-weight-only",
        hardware=BEFORE_ADA,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.FP8_STATIC, Kind.FP8_DYNAMIC, Kind.FP8_BLOCK),
        problem=(
            "no FP8 arithmetic before Ada: it runs weight-only, with 16-bit inputs; memory is saved, large batches are "
            "not faster than BF16"
        ),
        source="compressed_tensors_w8a8_fp8.py: get_min_capability is 89; below, Marlin or Humming",
    ),
    LoadingRule(
        name="vllm-b200-mxfp4-inputs",
        hardware=BLACKWELL,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.MXFP4, layout=compressed_tensors.NAME),
        problem=(
            "a weight-only MXFP4 checkpoint runs as W4A4 on sm_100: inputs are rounded to 4 bits, "
            "which no comparison here has measured"
        ),
        cure="start vLLM with --linear-backend marlin",
        source=f"{_SCHEME_CHOICE} does not look at input_activations; mxfp4/flashinfer.py (vllm issue 56770)",
    ),
    LoadingRule(
        name="vllm-b200-mxfp8-inputs",
        hardware=BLACKWELL,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.MXFP8),
        problem="a weight-only MXFP8 checkpoint runs as W8A8 on sm_100: inputs are rounded to MXFP8",
        cure="start vLLM with --linear-backend marlin",
        source=f"{_SCHEME_CHOICE} does not look at input_activations; mxfp8/flashinfer.py",
    ),
    LoadingRule(
        name="vllm-b200-w4a8",
        hardware=BLACKWELL,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.MXFP4_W4A8, layout=compressed_tensors.NAME, experts=False),
        problem="MXFP4 linears run as W4A4 on sm_100: inputs are rounded to 4 bits, where the checkpoint declares 8",
        cure="compare the model with --scheme mxfp4-w4a4, or start vLLM with --linear-backend marlin",
        source=f"{_SCHEME_CHOICE} does not look at input_activations; mxfp4/flashinfer.py (vllm issue 56770)",
    ),
    LoadingRule(
        name="vllm-mx-before-blackwell",
        hardware=BEFORE_BLACKWELL,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(Kind.MXFP8_W8A8, Kind.MXFP4_W4A4, Kind.MXFP4_W4A8, layout=compressed_tensors.NAME),
        problem="no MX arithmetic before Blackwell: it runs weight-only (Marlin), and inputs stay in 16 bits",
        source=f"{VLLM_KERNEL_LISTS}: _POSSIBLE_MXFP4_KERNELS and _POSSIBLE_MXFP8_KERNELS; Marlin is what is left",
    ),
    NVFP4_BEFORE_BLACKWELL,
    LoadingRule(
        name="vllm-mi300-nvfp4",
        hardware=FNUZ,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(Kind.NVFP4),
        problem="weight-only NVFP4 has no kernel on AMD",
        cure="quantize with --scheme fp8-block",
        source=f"{VLLM_KERNEL_LISTS}: init_nvfp4_linear_kernel forces MarlinNvFp4LinearKernel, which requires CUDA",
    ),
    LoadingRule(
        name="vllm-mi300-emulated",
        hardware=FNUZ,
        verdict=LoadVerdict.DEGRADED,
        condition=kinds(*MXFP8_KINDS, *MXFP4_KINDS, Kind.NVFP4_W4A4, experts=False),
        problem=(
            "gfx94x does not multiply this format: weights are decoded to BF16, at load or in every step, and nothing "
            "is faster"
        ),
        cure="quantize with --scheme fp8-block",
        source=f"{VLLM_KERNEL_LISTS}: the native MX kernels ask for gfx95x; Emulation*LinearKernel is what is left",
    ),
    LoadingRule(
        name="mi300-fnuz",
        hardware=FNUZ,
        verdict=LoadVerdict.LOADS,
        condition=kinds(Kind.FP8_STATIC, Kind.FP8_DYNAMIC, Kind.FP8_BLOCK),
        problem=(
            "MI300 computes in E4M3fnuz, where a code is worth half: codes stay, scales are doubled at load, -0 "
            "becomes 0"
        ),
        source="quantization/utils/w8a8_utils.py: normalize_e4m3fn_to_e4m3fnuz",
    ),
    EXPERTS_WEIGHT_ONLY_FP8,
    LoadingRule(
        name="vllm-single-experts",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(expert_conditions.single_experts, reader=expert_conditions.servers_read_single),
        problem="vLLM reads the experts of this model only fused, as the unquantized checkpoint stores them",
        cure="keep the experts in 16 bits: --exclude '\\.experts\\.', or serve it with minifloat",
        source="models/aria.py, models/gpt_oss.py: load_weights maps no single experts",
    ),
    LoadingRule(
        name="vllm-experts-unlisted",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=expert_conditions.unlisted_experts,
        problem=(
            "fused experts in 16 bits are not in the config's list of exceptions by the names of single experts: "
            "vLLM builds them quantized, and their weights have no place"
        ),
        cure="quantize the original again with minifloat quantize, which lists them",
        source="compressed_tensors_moe/compressed_tensors_moe.py: get_moe_method asks for the names of single experts",
        confirmed_with=f"{VLLM_CPU} (gpt-oss)",
    ),
    LoadingRule(
        name="vllm-cpu-experts",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(Kind.FP8_DYNAMIC, experts=True),
        problem="FP8 experts without blocks have no kernel on a CPU (Unsupported FP8 MoE backend)",
        cure=f"serve it with minifloat, or {USE_BLOCK} for a processor with AMX",
        source="compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py, whose choice of a backend is none",
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-fp8-layout-head",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.quantized_head, layout=fp8.NAME),
        problem="quant_method fp8 never quantizes lm_head: its scales have no place",
        cure="--layout compressed-tensors with --override '^lm_head$=fp8-dynamic', or keep it: --exclude '^lm_head$'",
        source="quantization/fp8.py: Fp8Config.get_quant_method covers linears, experts and attention",
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-head-blocks",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.head_in_blocks,
        problem="lm_head is not read in blocks of 128x128",
        cure="--override '^lm_head$=fp8-dynamic', or keep it: --exclude '^lm_head$'",
        source=(
            "model_executor/layers/vocab_parallel_embedding.py: weight_loader takes one row of scales for each token"
        ),
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-head-not-named",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.head_not_named,
        problem=(
            'the config group that lm_head belongs to targets "Linear", which lm_head is not for vLLM: '
            "its scales have no place"
        ),
        cure='add "lm_head" to the targets of that group in config.json, as minifloat quantize writes it',
        source="compressed_tensors/utils.py: find_matched_target; ParallelLMHead is no Linear",
        confirmed_with=VLLM_CPU,
    ),
    LoadingRule(
        name="vllm-modelopt-mxfp4",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(*MXFP4_KINDS, layout=modelopt.NAME),
        problem="vLLM knows no quant_algo mxfp4 of ModelOpt",
        cure="quantize the original with minifloat quantize --scheme mxfp4",
        source="quantization/modelopt.py: LINEAR_ALGOS",
    ),
    LoadingRule(
        name="vllm-kv-scales-missing",
        hardware=ALL,
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.kv_without_scales,
        problem="an FP8 KV cache is declared without scales: 1.0 is taken, and accuracy is lost without an error",
        cure="minifloat quantize --kv-cache fp8 --calibration DATA, or start vLLM with --kv-cache-dtype bfloat16",
        source="quantization/kv_cache.py: process_weights_after_loading",
    ),
    HEAD_UNQUANTIZED,
)
