"""`make_dequantize_plan`: plan to write the decoded weights of a quantized checkpoint."""

from __future__ import annotations

from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.errors import lookup
from minifloat.model.layouts.decoded import DTYPES, config_dtype, language_configs, without_quantization
from minifloat.model.layouts.inspection import format_name
from minifloat.quantize.convert.decoded import decoded_tensors
from minifloat.quantize.convert.plan import (
    Change,
    Conversion,
    ConvertPlan,
    describe_quantized,
    require_tensor,
    with_copies,
)


def make_dequantize_plan(checkpoint: Checkpoint, dtype: str | None = None) -> ConvertPlan:
    """Plan to write decoded weights."""
    description = describe_quantized(checkpoint)
    config = without_quantization(checkpoint.config)
    dtype_name = dtype or config_dtype(config)
    stored_dtype = lookup("dtype", dtype_name, DTYPES)
    if dtype is not None:
        _set_dtype(config, dtype)
    conversions = []
    for group in decoded_tensors(checkpoint, description):
        weights = [weight for matrix in group.matrices for weight in matrix]
        names = (name for weight in weights for name in weight.tensors if name != weight.input_scale)
        infos = tuple(require_tensor(checkpoint, name) for name in dict.fromkeys(names))
        output = OutputTensor(group.name, stored_dtype, group.shape)
        detail = f"from {format_name(weights[0].spec, weights[0].activation)}"
        conversions.append(Conversion(infos, output, Change.DECODE, detail, group.matrices, group.transposed))
        for scale in dict.fromkeys(weight.input_scale for weight in weights if weight.input_scale):
            info = checkpoint.tensors[scale]
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
