"""`quantized_model_config`: config.json of a quantized model, made of that of its source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.model.architecture.families import family_of
from minifloat.model.layouts import fp8
from minifloat.model.layouts.decoded import without_quantization
from minifloat.model.layouts.writing import WriteLayout

#: Key by which some models state the format of their experts, and its value for E4M3 in blocks.
_EXPERT_DTYPE, _FP8 = "expert_dtype", "fp8"


def quantized_model_config(
    source: Mapping[str, Any], layout: WriteLayout, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of a quantized model.

    DeepSeek-V4 states the format of its experts beside the `quantization_config`. vLLM takes them for MXFP4, and scales
    of linears for E8M0, where the key is missing (0.32.0, models/deepseek_v4/quant_config.py).
    """
    config = without_quantization(source)
    if layout.name == fp8.NAME and family_of(source).states_expert_dtype:
        config[_EXPERT_DTYPE] = _FP8
    return config | {"quantization_config": dict(quantization)}
