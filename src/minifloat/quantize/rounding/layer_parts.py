"""From the tensors of a layer to what is rounded and folded in it: shared by the walk with text and the one without."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from minifloat.checkpoint import TensorInfo
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.rounding.layer import LayerRounding, tensor_bytes
from minifloat.quantize.rounding.layer_fold import LayerFold
from minifloat.quantize.rounding.layer_tensors import part_view
from minifloat.quantize.rounding.methods import Method
from minifloat.quantize.rounding.rounded_model import Bytes
from minifloat.quantize.rounding.stages import Stage


def rounding_of(
    views: Mapping[str, Tensor],
    stages: Sequence[Stage],
    parts: Mapping[str, tuple[str, Part]],
    method: Method,
    compared: Sequence[Scheme] = (),
) -> LayerRounding:
    """Return the weights of a layer that are to be rounded, with views of them in the model."""
    modules = {module for stage in stages for slot in stage.slots for module in slot}
    chosen, weights = {}, {}
    for module in sorted(modules & parts.keys()):
        source, part = parts[module]
        if source in views:
            chosen[module], weights[module] = part, part_view(views[source], part)
    return LayerRounding(method, chosen, weights, compared)


def fold_of(
    index: int,
    views: Mapping[str, Tensor],
    infos: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    stages: Sequence[Stage],
    parts: Mapping[str, tuple[str, Part]],
) -> tuple[LayerFold, str]:
    """Return what folds scales in a layer, and the name of the layer in the checkpoint; empty if it has none."""
    marker = f".{index}."
    name = next(iter(views), "")
    prefix = name[: name.index(marker)] + marker[:-1] if marker in name else ""
    return LayerFold(prefix, infos, config, stages, parts, views), prefix


def folded_tensors(fold: LayerFold, quantized: Collection[str]) -> dict[str, Bytes]:
    """Return the tensors that folds changed and that are not quantized, and the exponents, by name in the output."""
    changed = {name: tensor_bytes(fold.views[name]) for name in sorted(fold.changed) if name not in quantized}
    return changed | {name: tensor_bytes(tensor) for name, tensor in fold.exponents.items()}
