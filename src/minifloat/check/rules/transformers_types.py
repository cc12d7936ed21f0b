"""Rules about model types whose code in transformers does not take quantized linears of some kinds."""

from __future__ import annotations

import functools

from minifloat.check import conditions
from minifloat.check.loading_rule import LoadingRule, LoadVerdict
from minifloat.check.rules.machines import ALL
from minifloat.check.subject import MXFP4_KINDS, Kind

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

RULES: tuple[LoadingRule, ...] = (
    LoadingRule(
        name="transformers-packed-weight",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.kinds_in_types, kinds=_FOUR_BITS, model_types=_READ_WEIGHTS),
        problem="the model's code reads the weight of a linear by name, and linears of packed 4-bit codes have none",
        cure=f"{_CURE}; or quantize to 8 bits",
        source="models/*/modeling_*.py: _init_weights, or forward (FalconLinear)",
        confirmed_with=_SEEN,
    ),
    LoadingRule(
        name="transformers-converted-packed",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.kinds_in_types, kinds=_FOUR_BITS, model_types=_CONVERT_FOUR_BITS),
        problem="tensors are joined or cut while they are loaded, which packed 4-bit codes do not allow",
        cure=f"{_CURE}; or quantize to 8 bits",
        source="conversion_mapping.py: WeightConverter of these model types",
        confirmed_with=_SEEN,
    ),
    LoadingRule(
        name="transformers-converted",
        hardware=ALL,
        verdict=LoadVerdict.REFUSED,
        condition=functools.partial(conditions.kinds_in_types, kinds=tuple(Kind), model_types=_CONVERT),
        problem="linears are cut while they are loaded, and codes and scales are not",
        cure=_CURE,
        source="conversion_mapping.py: WeightConverter of these model types",
        confirmed_with=_SEEN,
    ),
    LoadingRule(
        name="transformers-hrm-nvfp4",
        hardware=ALL,
        verdict=LoadVerdict.WRONG,
        condition=functools.partial(
            conditions.kinds_in_types, kinds=(Kind.NVFP4, Kind.NVFP4_W4A4), model_types=("hrm_text",)
        ),
        problem="global scales of NVFP4 have no place and are left at random",
        cure=f"{_CURE}; or quantize with --scheme mxfp4",
        source="conversion_mapping.py: WeightConverter of hrm_text",
        confirmed_with=_SEEN,
    ),
)
