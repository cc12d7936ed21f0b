"""Refusal of checkpoints whose quantization has parts other than codes and scales: rotations, smoothing, other formats.

Without these parts the converted model would compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConversionError
from minifloat.model.architecture.roles import is_dense_float
from minifloat.model.layouts import modelopt
from minifloat.model.layouts.stored import Description
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import TENSOR

#: Algorithms of ModelOpt that our reader knows; FP8_BLOCK_SCALES is an early name of FP8_PB_WO.
_KNOWN_ALGORITHMS = frozenset({*modelopt.ALGORITHMS, "FP8_BLOCK_SCALES", ""})
#: Tensors that a quantized linear may have beside codes and scales.
_PARAMETERS = frozenset({"weight", "bias"})


def refuse_unknown_quantization(checkpoint: Checkpoint, description: Description) -> None:
    """Raise an error if the quantization has parts that `description` does not hold."""
    config = checkpoint.quantization_config or {}
    _refuse_config(config)
    if description.layout == modelopt.NAME:
        _refuse_algorithms(config.get("quantization", config), description)
    _refuse_companions(checkpoint, description)


def refuse_kv(description: Description) -> None:
    """Refuse a quantized KV cache unless it is FP8 with a scale per tensor, the only kind that two layouts declare."""
    kv = description.kv
    if kv is not None and (kv.element, kv.granularity) != (E4M3, TENSOR):
        raise ConversionError(
            f"the KV cache is declared {kv.element.name} per {kv.granularity}, and only {E4M3.name} per {TENSOR} "
            "can be carried over; use --dequantize"
        )


def _refuse_config(config: Mapping[str, Any]) -> None:
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise ConversionError(f"quantization_config has a {key}, which no layout here can hold: not converted")
    groups = config.get("config_groups")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and group.get("output_activations"):
            raise ConversionError(f"quantization_config: {name} quantizes output_activations: not converted")


def _refuse_algorithms(quantization: Mapping[str, Any], description: Description) -> None:
    for module in description.weights:
        algorithm = modelopt.algorithm_of(quantization, module)
        if algorithm not in _KNOWN_ALGORITHMS | {modelopt.MIXED}:
            known = ", ".join(modelopt.ALGORITHMS)
            raise ConversionError(f"{module}: quant_algo {algorithm} is not one of {known}: not converted")


def _refuse_companions(checkpoint: Checkpoint, description: Description) -> None:
    """Refuse unknown tensors of quantized linears, and codes that belong to no known weight."""
    known = {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary
    for name, info in checkpoint.tensors.items():
        if name in known:
            continue
        module, _, leaf = name.rpartition(".")
        if module in description.weights and leaf not in _PARAMETERS:
            raise ConversionError(
                f"{name}: a tensor of a quantized linear that no layout here can hold; without it the model would "
                "compute something else"
            )
        if leaf in ("weight", "weight_packed") and len(info.shape) > 1 and not is_dense_float(info):
            raise ConversionError(f"{name}: {info.dtype} codes that belong to no weight of layout {description.layout}")
