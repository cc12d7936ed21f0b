"""Refusal of checkpoints that contradict themselves, or that conversion could not carry over.

`refuse_contradictions`: a wrong number of layers would be quantized in silence, and a million of them built before the
first is missed. `refuse_unknown_quantization`: without rotations, smoothing or other parts that no layout here holds, a
converted model would compute something else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, Checkpoint, TensorInfo
from minifloat.errors import ConfigError, ConversionError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.roles import (
    EXPERTS,
    decoder_layer,
    is_dense_float,
    is_own_part,
    mtp_layers,
    text_config,
)
from minifloat.model.layouts import mlx, modelopt
from minifloat.model.layouts.stored import Description
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import TENSOR

_EXPERT = re.compile(r"^(?P<block>.*\.experts)\.(?P<index>\d+)\.")
_NORM = re.compile(r"^((model|language_model)\.)*layers\.\d+\.input_layernorm\.weight$")
_FUSED_DIMENSIONS = 3
#: Names of the number of layers, by family.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
#: Layers that may be more than there are tensors, because some families have one layer's weights many times.
_FEW_LAYERS = 256


def refuse_contradictions(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], folder: Path) -> None:
    """Raise an error if the number of layers, the hidden size or the number of experts contradict the tensors."""
    path = folder / CONFIG_FILE
    _check_layers(config, tensors, path)
    _check_hidden(config, tensors, path)
    _check_experts(config, tensors, path)


def _size(config: Mapping[str, Any], *names: str) -> tuple[str, int] | None:
    """Return the first of these fields that is a positive integer, with its name."""
    text = text_config(config)
    found = ((name, text.get(name)) for name in names)
    return next(((name, size) for name, size in found if type(size) is int and size > 0), None)


def _check_layers(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    declared = _size(config, *_LAYERS)
    if declared is not None and declared[1] > max(len(tensors), _FEW_LAYERS):
        raise ConfigError(
            path, f"{declared[0]} is {declared[1]}, and there are only {len(tensors)} tensors: correct {declared[0]}"
        )
    layers: dict[int, list[str]] = defaultdict(list)
    for name in tensors:
        index = decoder_layer(name)
        if index is not None:
            layers[index].append(name)
    if declared is None or not layers:
        return
    field, count = declared
    missing = next((index for index in range(count) if index not in layers), None)
    if missing is not None:
        raise ConfigError(
            path,
            f"{field} is {count}, and no tensor belongs to layer {missing}; found layers "
            f"{min(layers)} to {max(layers)}: download the missing shards, or correct {field}",
        )
    for index in range(count, max(layers) + 1):
        names = layers.get(index, [])
        if names and index >= count + mtp_layers(config) and not any(is_own_part(name) for name in names):
            raise ConfigError(
                path,
                f"{field} is {count}, and {names[0]} belongs to layer {index}, which is no layer of "
                f"multi-token prediction (num_nextn_predict_layers): correct {field}",
            )


def _check_hidden(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    hidden = _size(config, "hidden_size")
    for name, info in tensors.items():
        if hidden is not None and _NORM.match(name) and info.shape != (hidden[1],):
            raise ConfigError(
                path,
                f"hidden_size is {hidden[1]}, and {name} has the shape {list(info.shape)}: the config is of another "
                "model than the weights; take both from one place",
            )


def _check_experts(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path) -> None:
    declared = _size(config, *EXPERTS)
    if declared is None:
        return
    field, count = declared
    family = family_of(config)
    found: dict[str, int] = defaultdict(int)
    for name, info in tensors.items():
        match = _EXPERT.match(name)
        if match is not None and decoder_layer(name) is not None:
            found[match["block"]] = max(found[match["block"]], int(match["index"]) + 1)
        elif len(info.shape) == _FUSED_DIMENSIONS and family.fused_tensor(name) is not None:
            found[name] = info.shape[0]
    for block, experts in found.items():
        if experts != count:
            raise ConfigError(
                path,
                f"{field} is {count}, and {block} has {experts} experts: the config is of another model than the "
                "weights; take both from one place",
            )


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
    if description.layout == mlx.NAME and any(weight.expert is not None for weight in description.weights.values()):
        raise ConversionError(
            f"{checkpoint.path}: stacks of experts in mlx's layout are not taken apart; start from the checkpoint that "
            "the folder was converted from"
        )
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
