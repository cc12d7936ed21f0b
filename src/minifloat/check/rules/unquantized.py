"""Rules about linears that vLLM and SGLang build without quantization: codes and scales of these have no place."""

from __future__ import annotations

import functools

from minifloat.check import unquantized_conditions as conditions
from minifloat.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.check.rules.machines import ALL, GPUS

_KEEP = "quantize the original again and keep them, as minifloat quantize does by default"
_NO_PLACE = "are built without quantization, so that their codes and scales have no place"
#: Model types whose projection both engines build quantized.
_DRAFTS_QUANTIZED = ("longcat_flash", "nemotron_h", "bailing_moe", "bailing_hybrid")
_DRAFTS = (
    "the projection of multi-token prediction is built without quantization: the model loads, speculative decoding "
    "with these layers does not"
)

VLLM: tuple[LoadingRule, ...] = (
    LoadingRule(
        name="vllm-indexer",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.indexer,
        problem=f"keys and scores of the indexer are one linear, and {_NO_PLACE} (keys in E4M3 are decoded at load)",
        cure=f"{_KEEP}; of another tool: leave out indexer.weights_proj",
        source="models/deepseek_v2.py: Indexer.wk_weights_proj, _try_load_fp8_indexer_wk",
    ),
    LoadingRule(
        name="vllm-mtp-projection",
        hardware=ALL,
        verdict=LoadVerdict.DEGRADED,
        condition=functools.partial(
            conditions.draft_projection,
            leaves=("eh_proj", "mtp_linear_proj", "input_proj"),
            except_types=_DRAFTS_QUANTIZED,
        ),
        problem=_DRAFTS,
        cure=_KEEP,
        source="models/deepseek_mtp.py, glm4_moe_mtp.py, ernie_mtp.py, mimo_mtp.py: nn.Linear",
    ),
    LoadingRule(
        name="vllm-mamba-1",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.selective_state_space,
        problem=f"the projections of Mamba layers of the first kind {_NO_PLACE}",
        cure=r"keep them with --exclude '\.(in_proj|x_proj|dt_proj|out_proj)$', or serve it with SGLang or minifloat",
        source="layers/mamba/mamba_mixer.py: MambaMixer takes no quant_config",
    ),
    LoadingRule(
        name="vllm-router",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.routers, except_types=("qwen3_moe", "lfm2_moe")),
        problem=f"routers and gates of shared experts {_NO_PLACE}",
        cure=_KEEP,
        source="models: GateLinear and ReplicatedLinear of gate, router and shared_expert_gate have quant_config=None",
    ),
)

SGLANG: tuple[LoadingRule, ...] = (
    LoadingRule(
        name="sglang-indexer",
        hardware=GPUS,
        verdict=LoadVerdict.REFUSED,
        condition=conditions.indexer_scores,
        problem=f"the scores of the indexer {_NO_PLACE}",
        cure=f"{_KEEP}; of another tool: leave out indexer.weights_proj",
        source="SGLang 0.5.23: layers/attention/dsa/dsa_indexer.py: weights_proj",
    ),
    LoadingRule(
        name="sglang-mtp-projection",
        hardware=GPUS,
        verdict=LoadVerdict.DEGRADED,
        condition=functools.partial(
            conditions.draft_projection, leaves=("eh_proj", "mtp_linear_proj", "fc"), except_types=_DRAFTS_QUANTIZED
        ),
        problem=_DRAFTS,
        cure=_KEEP,
        source="SGLang 0.5.23: models/deepseek_nextn.py, glm4_moe_nextn.py, qwen3_5_mtp.py: nn.Linear",
    ),
    LoadingRule(
        name="sglang-router",
        hardware=GPUS,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.routers, except_types=()),
        problem=f"routers and gates of shared experts {_NO_PLACE}",
        cure=_KEEP,
        source="SGLang 0.5.23: models: ReplicatedLinear and nn.Linear of gate and router have no quant_config",
    ),
    LoadingRule(
        name="sglang-olmo",
        hardware=GPUS,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.attention_of, model_types=("olmo",)),
        problem=f"the projections of OLMo's attention {_NO_PLACE}",
        cure=r"keep them with --exclude '\.self_attn\.', or serve it with vLLM or minifloat",
        source="SGLang 0.5.23: models/olmo.py: OlmoAttention gives its linears no quant_config",
    ),
)
