"""What a config or a tensor's name says about a checkpoint that its codes and scales alone do not carry.

A rotation of the inputs, a scale of smoothing, a format that our reader knows only in part: converted without it, the
model would be another one. All of it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.architecture.roles import is_dense_float
from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConversionError
from minifloat.layouts import Description, modelopt
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import TENSOR

#: Algorithms of ModelOpt that are read as what they are; FP8_BLOCK_SCALES is an early name of FP8_PB_WO.
_KNOWN_ALGORITHMS = frozenset({*modelopt.ALGORITHMS, "FP8_BLOCK_SCALES", ""})
#: What a quantized linear may have beside codes and scales.
_PARAMETERS = frozenset({"weight", "bias"})


def refuse_what_is_not_carried(checkpoint: Checkpoint, description: Description) -> None:
    """Raise where there is more to the quantization than `description` says.

    Raises:
        ConversionError: It is named.
    """
    config = checkpoint.quantization_config or {}
    _refuse_config(config)
    if description.layout == modelopt.NAME:
        _refuse_algorithms(config.get("quantization", config), description)
    _refuse_companions(checkpoint, description)


def refuse_kv(description: Description) -> None:
    """Raise unless a quantized KV cache is FP8 with a scale per tensor, the one kind that two layouts announce.

    Raises:
        ConversionError: It is another.
    """
    kv = description.kv
    if kv is not None and (kv.element, kv.granularity) != (E4M3, TENSOR):
        raise ConversionError(
            f"the KV cache is declared {kv.element.name} per {kv.granularity}, and only {E4M3.name} per {TENSOR} "
            "can be carried over; use --dequantize"
        )


def _refuse_config(config: Mapping[str, Any]) -> None:
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise ConversionError(
                f"quantization_config has a {key}, which is more than codes and scales: not converted"
            )
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
    """Tensors beside the weight of a quantized linear that mean something we do not know; codes of no known weight."""
    known = {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary
    for name, info in checkpoint.tensors.items():
        if name in known:
            continue
        module, _, leaf = name.rpartition(".")
        if module in description.weights and leaf not in _PARAMETERS:
            raise ConversionError(
                f"{name}: a tensor of a quantized linear that no layout here has a place for; without it the model "
                "would be another one"
            )
        if leaf in ("weight", "weight_packed") and len(info.shape) > 1 and not is_dense_float(info):
            raise ConversionError(f"{name}: {info.dtype} codes that belong to no weight of layout {description.layout}")
