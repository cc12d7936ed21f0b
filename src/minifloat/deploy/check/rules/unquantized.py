"""Rules about linears that vLLM and SGLang build without quantization: codes and scales of these have no place."""

from __future__ import annotations

import functools

from minifloat.deploy.check import unquantized_conditions as conditions
from minifloat.deploy.check.loading_rule import Condition, LoadingRule, LoadVerdict
from minifloat.deploy.check.rules.machines import ALL, GPUS

_KEEP = "quantize the original again and keep them, as minifloat quantize does by default"
_KEEP_SCORES = f"{_KEEP}; of another tool: leave out indexer.weights_proj"
#: Model types whose projection both engines build quantized.
_DRAFTS_QUANTIZED = ("longcat_flash", "nemotron_h", "bailing_moe", "bailing_hybrid")
_SGLANG = "SGLang 0.5.23: "


def _refused(
    name: str,
    hardware: tuple[str, ...],
    condition: Condition,
    what: str,
    source: str,
    cure: str = _KEEP,
    note: str = "",
) -> LoadingRule:
    """Return the rule of linears without which the model does not load."""
    problem = f"{what} are built without quantization, so that their codes and scales have no place{note}"
    return LoadingRule(
        name=name,
        hardware=hardware,
        verdict=LoadVerdict.REFUSED,
        condition=condition,
        problem=problem,
        cure=cure,
        source=source,
    )


def _drafts(name: str, hardware: tuple[str, ...], leaves: tuple[str, ...], source: str) -> LoadingRule:
    """Return the rule of the projection of embedding and hidden state in layers of multi-token prediction."""
    return LoadingRule(
        name=name,
        hardware=hardware,
        verdict=LoadVerdict.DEGRADED,
        condition=functools.partial(conditions.draft_projection, leaves=leaves, except_types=_DRAFTS_QUANTIZED),
        problem=(
            "the projection of multi-token prediction is built without quantization: the model loads, speculative "
            "decoding with these layers does not"
        ),
        cure=_KEEP,
        source=source,
    )


VLLM: tuple[LoadingRule, ...] = (
    _refused(
        "vllm-indexer",
        ALL,
        conditions.indexer,
        "keys and scores of the indexer",
        "models/deepseek_v2.py: Indexer.wk_weights_proj, _try_load_fp8_indexer_wk",
        _KEEP_SCORES,
        " (keys in E4M3 are decoded at load)",
    ),
    _drafts(
        "vllm-mtp-projection",
        ALL,
        ("eh_proj", "mtp_linear_proj", "input_proj"),
        "models/deepseek_mtp.py, glm4_moe_mtp.py, ernie_mtp.py, mimo_mtp.py: nn.Linear",
    ),
    _refused(
        "vllm-mamba-1",
        ALL,
        conditions.selective_state_space,
        "the projections of Mamba layers of the first kind",
        "layers/mamba/mamba_mixer.py: MambaMixer takes no quant_config",
        r"keep them with --exclude '\.(in_proj|x_proj|dt_proj|out_proj)$', or serve it with SGLang or minifloat",
    ),
    _refused(
        "vllm-router",
        ALL,
        functools.partial(conditions.routers, except_types=("qwen3_moe", "lfm2_moe")),
        "routers and gates of shared experts",
        "models: GateLinear and ReplicatedLinear of gate, router and shared_expert_gate have quant_config=None",
    ),
)

SGLANG: tuple[LoadingRule, ...] = (
    _refused(
        "sglang-indexer",
        GPUS,
        conditions.indexer_scores,
        "the scores of the indexer",
        f"{_SGLANG}layers/attention/dsa/dsa_indexer.py: weights_proj",
        _KEEP_SCORES,
    ),
    _drafts(
        "sglang-mtp-projection",
        GPUS,
        ("eh_proj", "mtp_linear_proj", "fc"),
        f"{_SGLANG}models/deepseek_nextn.py, glm4_moe_nextn.py, qwen3_5_mtp.py: nn.Linear",
    ),
    _refused(
        "sglang-router",
        GPUS,
        functools.partial(conditions.routers, except_types=()),
        "routers and gates of shared experts",
        f"{_SGLANG}models: ReplicatedLinear and nn.Linear of gate and router have no quant_config",
    ),
    _refused(
        "sglang-olmo",
        GPUS,
        functools.partial(conditions.attention_of, model_types=("olmo",)),
        "the projections of OLMo's attention",
        f"{_SGLANG}models/olmo.py: OlmoAttention gives its linears no quant_config",
        r"keep them with --exclude '\.self_attn\.', or serve it with vLLM or minifloat",
    ),
)
