"""`make_dequantize_plan`: plan to write the decoded weights of a quantized checkpoint."""

from __future__ import annotations

from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.convert.plan import (
    Change,
    Conversion,
    ConvertPlan,
    describe_quantized,
    require_tensor,
    with_copies,
)
from minifloat.errors import lookup
from minifloat.layouts import StoredWeight
from minifloat.layouts.decoded import DTYPES, config_dtype, language_configs, plain_tensor, without_quantization
from minifloat.layouts.inspection import format_name


def make_dequantize_plan(checkpoint: Checkpoint, dtype: str | None = None) -> ConvertPlan:
    """Plan to write decoded weights.

    Args:
        checkpoint: A quantized checkpoint.
        dtype: A key of `DTYPES`; by default that of config.json, or bfloat16.

    Raises:
        UsageError: The checkpoint is not quantized.
        UnknownNameError: The dtype is unknown.
        ConversionError: The quantization has parts other than codes and scales.
    """
    description = describe_quantized(checkpoint)
    config = without_quantization(checkpoint.config)
    dtype_name = dtype or config_dtype(config)
    stored_dtype = lookup("dtype", dtype_name, DTYPES)
    if dtype is not None:
        _set_dtype(config, dtype)
    conversions = []
    by_codes: dict[str, list[StoredWeight]] = {}
    for weight in description.weights.values():
        by_codes.setdefault(weight.codes, []).append(weight)
    for weights in by_codes.values():
        first = weights[0]
        output = plain_tensor(weights, stored_dtype)
        names = (name for name in first.tensors if name != first.input_scale)
        infos = tuple(require_tensor(checkpoint, name) for name in names)
        detail = format_name(first.spec, first.activation)
        conversions.append(Conversion(infos, output, Change.DECODE, f"from {detail}", tuple(weights)))
        if first.input_scale is not None:
            info = checkpoint.tensors[first.input_scale]
            conversions.append(Conversion((info,), None, Change.DROP, "inputs are no longer quantized"))
    for name in description.auxiliary:
        conversions.append(Conversion((checkpoint.tensors[name],), None, Change.DROP, "belongs to the quantization"))
    return ConvertPlan(str(description.layout), None, dtype_name, with_copies(checkpoint, conversions), config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for part in language_configs(config):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
