"""Rules about checkpoints that SGLang refuses, degrades or answers wrongly."""

from __future__ import annotations

from minifloat.deploy.check import conditions, parallel_conditions
from minifloat.deploy.check.conditions import kinds
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules import unquantized
from minifloat.deploy.check.rules.machines import CPUS, GPUS
from minifloat.deploy.check.rules.shared import (
    BLOCKS_128,
    EXPERTS_WEIGHT_ONLY_FP8,
    FEWER_GPUS,
    HEAD_UNQUANTIZED,
    NVFP4_BEFORE_BLACKWELL,
    SGLANG_SCHEMES,
    USE_BLOCK,
)
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, Kind
from minifloat.model.layouts import compressed_tensors

RULES: tuple[LoadingRule, ...] = (
    *unquantized.SGLANG,
    BLOCKS_128,
    NVFP4_BEFORE_BLACKWELL,
    EXPERTS_WEIGHT_ONLY_FP8,
    LoadingRule(
        name="sglang-cpu",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.has_layout(compressed_tensors.NAME),
        problem="compressed-tensors asks for a CUDA device",
        cure="serve it with minifloat, or with vLLM in fp8-block",
        source=f"{SGLANG_SCHEMES}: _check_scheme_supported asks torch.cuda",
    ),
    LoadingRule(
        name="sglang-mxfp8",
        hardware=GPUS,
        verdict=LoadVerdict.REFUSED,
        condition=kinds(*MXFP8_KINDS, layout=compressed_tensors.NAME),
        problem="MXFP8 is not read from compressed-tensors, only as SGLang's own quant_method mxfp8",
        cure=USE_BLOCK,
        source=f"{SGLANG_SCHEMES}: _get_scheme_from_parts has no 8-bit groups",
    ),
    LoadingRule(
        name="sglang-mxfp4-experts",
        hardware=GPUS,
        verdict=LoadVerdict.UNKNOWN,
        condition=kinds(*MXFP4_KINDS, layout=compressed_tensors.NAME, experts=True),
        problem="it is not known how SGLang loads MXFP4 experts in compressed-tensors",
        cure="try it with a small model",
        source="not read",
    ),
    LoadingRule(
        name="sglang-mxfp4-inputs",
        hardware=GPUS,
        verdict=LoadVerdict.UNKNOWN,
        condition=kinds(Kind.MXFP4_W4A4, Kind.MXFP4_W4A8, layout=compressed_tensors.NAME, experts=False),
        problem="it is not known how SGLang loads MXFP4 linears with quantized inputs",
        cure="try it with a small model, or quantize with --scheme mxfp4",
        source="not read",
    ),
    LoadingRule(
        name="sglang-tensor-parallelism",
        hardware=GPUS,
        verdict=LoadVerdict.UNKNOWN,
        condition=parallel_conditions.uneven_anything,
        problem="it is not known what SGLang does with heads or matrices that the GPUs cannot share evenly",
        cure=FEWER_GPUS,
        source="not read",
    ),
    LoadingRule(
        name="sglang-weight-only-blocks",
        hardware=GPUS,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.weight_only_blocks,
        problem="FP8 blocks are loaded only with quantized inputs",
        cure="declare inputs in groups of 128, as --scheme fp8-block does",
        source=f"{SGLANG_SCHEMES}: _is_fp8_w8a16",
    ),
    HEAD_UNQUANTIZED,
)
