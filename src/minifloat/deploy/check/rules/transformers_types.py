"""Rules about model types whose code in transformers does not take quantized linears of some kinds."""

from __future__ import annotations

import functools

from minifloat.deploy.check import conditions
from minifloat.deploy.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.deploy.check.rules.machines import ALL
from minifloat.deploy.check.subject import MXFP4_KINDS, Kind

_FOUR_BITS = (*MXFP4_KINDS, Kind.NVFP4, Kind.NVFP4_W4A4)
_SEEN = "transformers 5.23.0 with compressed-tensors 0.20.0 on a CPU"
_CURE = "load it with minifloat.load, or decode it: minifloat convert --dequantize"

#: Their code reads `weight` of a linear by name, which packed linears do not have.
_READ_WEIGHTS = (
    *("falcon", "falcon_mamba", "gpt_bigcode", "mamba", "mamba2", "modernbert", "modernbert-decoder", "nanochat"),
    *("recurrent_gemma", "rwkv", "xlstm"),
)
#: Their linears are joined or cut while they are loaded.
_CONVERT_FOUR_BITS = ("bailing_hybrid", "glm5_next", "glm5_next_text", "kimi_linear", "olmo_hybrid", "step3p7")
_CONVERT = ("inkling_mm_model", "qianfan_ocr")


def _rule(
    name: str,
    model_types: tuple[str, ...],
    problem: str,
    cure: str,
    source: str,
    *,
    kinds: tuple[Kind, ...] = _FOUR_BITS,
    verdict: LoadVerdict = LoadVerdict.REFUSED,
) -> LoadingRule:
    """Return a rule about linears of some kinds, by default those of 4 bits, in some model types."""
    return LoadingRule(
        name=name,
        hardware=ALL,
        verdict=verdict,
        condition=functools.partial(conditions.kinds_in_types, kinds=kinds, model_types=model_types),
        problem=problem,
        cure=cure,
        source=source,
        confirmed_with=_SEEN,
    )


RULES: tuple[LoadingRule, ...] = (
    _rule(
        "transformers-packed-weight",
        _READ_WEIGHTS,
        "the model's code reads the weight of a linear by name, and linears of packed 4-bit codes have none",
        f"{_CURE}; or quantize to 8 bits",
        "models/*/modeling_*.py: _init_weights, or forward (FalconLinear)",
    ),
    _rule(
        "transformers-converted-packed",
        _CONVERT_FOUR_BITS,
        "tensors are joined or cut while they are loaded, which packed 4-bit codes do not allow",
        f"{_CURE}; or quantize to 8 bits",
        "conversion_mapping.py: WeightConverter of these model types",
    ),
    _rule(
        "transformers-converted",
        _CONVERT,
        "linears are cut while they are loaded, and codes and scales are not",
        _CURE,
        "conversion_mapping.py: WeightConverter of these model types",
        kinds=tuple(Kind),
    ),
    _rule(
        "transformers-hrm-nvfp4",
        ("hrm_text",),
        "global scales of NVFP4 have no place and are left at random",
        f"{_CURE}; or quantize with --scheme mxfp4",
        "conversion_mapping.py: WeightConverter of hrm_text",
        kinds=(Kind.NVFP4, Kind.NVFP4_W4A4),
        verdict=LoadVerdict.WRONG,
    ),
)
