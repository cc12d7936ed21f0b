"""Rules about checkpoints that minifloat's own loader and server refuse or degrade."""

from __future__ import annotations

from minifloat.deploy.check import conditions
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules.machines import ALL, AMD, CPUS, NVIDIA
from minifloat.deploy.check.rules.shared import HEAD_UNQUANTIZED
from minifloat.model.architecture.multimodal import TEXT_ONLY

RULES: tuple[LoadingRule, ...] = (
    LoadingRule(
        name="minifloat-nvidia-only",
        hardware=AMD,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.anything,
        problem="minifloat serves on CPUs and on NVIDIA GPUs",
        cure="use --engine vllm or sglang on AMD GPUs",
        source="runtime/devices.py: device_named",
    ),
    LoadingRule(
        name="minifloat-gpu-unmeasured",
        hardware=NVIDIA,
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.anything,
        problem="built for GPUs from Ampere on; run on an H100 alone, and not since its last changes (docs/gpu.md)",
        source="serve/engine/device",
    ),
    LoadingRule(
        name="minifloat-one-process",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.several_gpus,
        problem="minifloat does not share a model between processes",
        cure="--tp 1, or --engine vllm",
        source="minifloat serve",
    ),
    LoadingRule(
        name="minifloat-dense-mxfp4",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.dense_mxfp4,
        problem="quant_method mxfp4 is for gpt-oss' fused experts, and there are none",
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="layouts/gpt_oss.py: describe",
        confirmed_with="minifloat.load",
    ),
    LoadingRule(
        name="minifloat-not-native",
        hardware=(*CPUS, *NVIDIA),
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.not_native,
        problem="transformers' code runs the model, one sequence at a time, with our linears in it",
        source="architecture/decoder/__init__.py: NATIVE",
        confirmed_with="minifloat.Engine",
    ),
    LoadingRule(
        name="minifloat-text-only",
        hardware=(*CPUS, *NVIDIA),
        verdict=LoadVerdict.LOADS,
        condition=conditions.only_text,
        problem=TEXT_ONLY,
        source="architecture/multimodal.py",
        confirmed_with="minifloat.Engine",
    ),
    LoadingRule(
        name="minifloat-kv-scales-missing",
        hardware=(*CPUS, *NVIDIA),
        verdict=LoadVerdict.LOADS,
        condition=conditions.kv_without_scales,
        problem="an FP8 KV cache is declared without scales: the cache stays BF16, with a warning",
        cure="minifloat quantize --kv-cache fp8 --calibration DATA",
        source="serve/engine/opening.py",
    ),
    HEAD_UNQUANTIZED,
)
