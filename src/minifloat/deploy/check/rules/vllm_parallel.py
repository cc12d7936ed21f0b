"""Rules about checkpoints whose heads, matrices, blocks or fused layers several GPUs cannot share in vLLM."""

from __future__ import annotations

from minifloat.deploy.check import conditions, parallel_conditions
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules.machines import ALL
from minifloat.deploy.check.rules.shared import BLOCKS_128, FEWER_GPUS, VLLM_CPU

RULES: tuple[LoadingRule, ...] = (
    LoadingRule(
        name="tp-attention-heads",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=parallel_conditions.uneven_heads,
        problem="the GPUs cannot share the attention heads evenly",
        cure="choose --tp so that it divides the number of heads",
        source="config/model.py: verify_with_parallel_config",
    ),
    LoadingRule(
        name="tp-kv-heads",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=parallel_conditions.uneven_kv_heads,
        problem="the GPUs can neither share the key-value heads nor copy them evenly",
        cure="choose --tp so that it divides the number of key-value heads or is a multiple of it",
        source="model_executor/layers/linear.py: QKVParallelLinear",
    ),
    LoadingRule(
        name="tp-kv-heads-copied",
        hardware=ALL,
        verdict=LoadVerdict.DEGRADED,
        condition=parallel_conditions.copied_kv_heads,
        problem="fewer key-value heads than GPUs: heads are copied, and more GPUs make the KV cache no larger",
        cure=FEWER_GPUS,
        source="model_executor/layers/linear.py: QKVParallelLinear",
    ),
    LoadingRule(
        name="tp-matrices",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=parallel_conditions.uneven_matrices,
        problem="the GPUs cannot share a matrix evenly",
        cure=FEWER_GPUS,
        source="distributed/utils.py: divide, as called by ColumnParallelLinear and RowParallelLinear",
    ),
    BLOCKS_128,
    LoadingRule(
        name="blocks-128-experts",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=parallel_conditions.broken_expert_blocks,
        problem="the inner size of the experts is not made of whole blocks of 128 on every GPU (192 % 128 = 64)",
        cure="use fewer GPUs, expert instead of tensor parallelism, or --scheme fp8-dynamic",
        source="quantization/utils/fp8_utils.py: validate_fp8_block_shape_moe",
    ),
    LoadingRule(
        name="groups-across-gpus",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=parallel_conditions.broken_groups,
        problem=(
            "a group of columns that share a scale would lie on two GPUs, and the scales of a GPU belong to other "
            "columns"
        ),
        cure=f"{FEWER_GPUS}; or give these modules a scheme without groups: --override 'REGEX=fp8'",
        source=(
            "compressed_tensors/schemes/compressed_tensors_w4a4_mxfp4.py: create_weights rounds the number of scales "
            "down"
        ),
    ),
    LoadingRule(
        name="fused-layers-mixed",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.mixed_fused,
        problem="q, k and v, gate and up, and the experts of a layer run as one and must be quantized alike",
        cure="widen the override so that it matches all of them; minifloat quantize does not write such a checkpoint",
        source="compressed_tensors/utils.py: should_ignore_layer, find_matched_target",
        confirmed_with=f"{VLLM_CPU} (q in BF16, k and v in FP8)",
    ),
)
