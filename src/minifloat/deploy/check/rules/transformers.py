"""Rules about checkpoints that transformers refuses, degrades or answers wrongly."""

from __future__ import annotations

import functools

from minifloat.deploy.check import conditions, expert_conditions
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules import transformers_types
from minifloat.deploy.check.rules.machines import ALL, CPUS, WITHOUT_FP8
from minifloat.model.layouts import compressed_tensors, fp8

_TRANSFORMERS_CPU = "transformers 5.23.0 on a CPU"

RULES: tuple[LoadingRule, ...] = (
    *transformers_types.RULES,
    LoadingRule(
        name="transformers-modelopt-fp8",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=conditions.modelopt_fp8,
        problem=(
            "transformers does not know ModelOpt: codes are used as weights and the scales are ignored, without an "
            "error"
        ),
        cure="load it with minifloat.load, or serve it with vLLM",
        source="quantizers/auto.py: AUTO_QUANTIZER_MAPPING has no modelopt, and an unknown method is skipped",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-modelopt-fp4",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.modelopt_fp4,
        problem="transformers does not know ModelOpt, and packed codes do not have the shape of the weights",
        cure="load it with minifloat.load, or serve it with vLLM",
        source="quantizers/auto.py: AUTO_QUANTIZER_MAPPING has no modelopt",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-fp8-per-tensor",
        hardware=CPUS,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.fp8_per_tensor,
        problem=(
            "transformers expects the scales under other names: codes stay undecoded, and the first forward pass fails"
        ),
        cure="use compressed-tensors: --scheme fp8-static",
        source="integrations/finegrained_fp8.py names the scales weight_scale_inv and activation_scale",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-partial-blocks-misread",
        hardware=WITHOUT_FP8,
        verdict=LoadVerdict.WRONG,
        condition=functools.partial(conditions.partial_blocks, divisible=True),
        problem=(
            "blocks at the edge are partial, and the block size is guessed from the shapes: weights are scaled wrongly"
        ),
        cure="use compressed-tensors; minifloat quantize --layout fp8 does not write such weights",
        source="integrations/finegrained_fp8.py: Fp8Dequantize divides the shape of a weight by that of its scales",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-partial-blocks",
        hardware=WITHOUT_FP8,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.partial_blocks, divisible=False),
        problem="blocks at the edge are partial, and the grid of scales does not divide the weight",
        cure="use compressed-tensors; minifloat quantize --layout fp8 does not write such weights",
        source="integrations/finegrained_fp8.py: Fp8Dequantize",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-ragged-inputs",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=lambda case: conditions.ragged_inputs(case) if case.subject.layout == compressed_tensors.NAME else (),
        problem="it loads, and the first forward pass fails: inputs do not fill their groups",
        cure="keep these modules with --exclude, or use --scheme fp8-dynamic",
        source="compressed-tensors: quantization/lifecycle/forward.py splits inputs into whole groups",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-single-experts",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=functools.partial(
            expert_conditions.single_experts, reader=expert_conditions.transformers_reads_single
        ),
        problem=(
            "experts are stored one by one, as servers read them, and transformers knows only fused experts of this "
            "model: it starts with random ones, with a warning"
        ),
        cure="load it with minifloat.load, serve it with minifloat or vLLM, or convert it with --dequantize",
        source="conversion_mapping.py: no MergeModulelist; quantizers/base.py takes apart Llama4TextExperts only",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-experts-blocks",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=expert_conditions.experts_in_blocks,
        problem="experts are fused while they are loaded, and the scales of blocks are not expanded to the blocks",
        cure="quantize the experts with --scheme fp8, fp8-dynamic or mxfp4; or load it with minifloat.load",
        source=(
            "integrations/compressed_tensors.py: CompressedTensorsDequantize multiplies 8-bit codes by scales as stored"
        ),
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-experts-nvfp4",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=expert_conditions.experts_with_global_scale,
        problem="experts are fused while they are loaded, and without their global scale: they are far too large",
        cure="quantize the experts with --scheme mxfp4; or load it with minifloat.load",
        source="integrations/compressed_tensors.py: CompressedTensorsDequantize is not given weight_global_scale",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-experts-mixed",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=expert_conditions.experts_of_several_elements,
        problem=(
            "experts are fused while they are loaded, all of them in the format of the first config group that has "
            "experts"
        ),
        cure="quantize all experts alike: --override '\\.experts\\.=SCHEME'; or load it with minifloat.load",
        source="integrations/compressed_tensors.py: get_experts_scheme looks for one group",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-dense-mxfp4",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=conditions.dense_mxfp4,
        problem=(
            "quant_method mxfp4 is for gpt-oss' fused experts: linears are left with random weights, with a warning"
        ),
        cure="write dense MXFP4 as compressed-tensors: minifloat quantize --scheme mxfp4",
        source="integrations/mxfp4.py replaces gpt-oss' experts only",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-decompresses",
        hardware=ALL,
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.has_layout(compressed_tensors.NAME),
        problem="weights become BF16 at the first forward pass: neither memory nor time is saved",
        cure="for speed serve it with vLLM or minifloat; for a check of accuracy this is enough",
        source="quantizers/quantizer_compressed_tensors.py: decompressed at the first pass",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-decodes-fp8",
        hardware=WITHOUT_FP8,
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.has_layout(fp8.NAME),
        problem="without FP8 arithmetic weights become BF16 at load: neither memory nor time is saved",
        cure="serve it with vLLM or minifloat",
        source="quantizers/quantizer_finegrained_fp8.py: validate_environment",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-decodes-mxfp4",
        hardware=CPUS,
        verdict=LoadVerdict.DEGRADED,
        condition=conditions.fused_experts,
        problem=(
            "without triton and the kernels package the experts become BF16 at load: neither memory nor time is saved"
        ),
        cure="serve it with vLLM or minifloat",
        source="quantizers/quantizer_mxfp4.py: validate_environment",
        confirmed_with=_TRANSFORMERS_CPU,
    ),
    LoadingRule(
        name="transformers-kv-cache",
        hardware=ALL,
        verdict=LoadVerdict.LOADS,
        condition=conditions.kv_declared,
        problem="the FP8 KV cache is not used: keys and values are kept in 16 bits",
        source="cache_utils.py has no FP8 cache with scales of a checkpoint",
    ),
)
