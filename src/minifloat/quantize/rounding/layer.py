"""Chooses the codes of the weights of one layer, and puts them into the running model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.checkpoint import TensorInfo
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.errors import NonFiniteError
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.feedback import DAMPING, Feedback, times
from minifloat.quantize.rounding.layer_fold import FoldSample, LayerFold, layer_tensors, part_view
from minifloat.quantize.rounding.methods import Grid, Method, SharedInput, error_of
from minifloat.quantize.rounding.rounded_model import Bytes
from minifloat.quantize.rounding.stages import Stage
from minifloat.quantize.rounding.statistics import Rows, Statistics

#: Fewer held-out rows than this say too little to prefer rounding to nearest.
_FEWEST_HELD_OUT = 16


@dataclass
class LayerRounding:
    """The weights of one layer while they are rounded."""

    method: Method
    parts: Mapping[str, Part]
    weights: Mapping[str, Tensor]
    tensors: dict[str, Bytes] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    moments: Mapping[str, Tensor] = field(default_factory=dict)  # of the gradients of outputs, by module

    def __post_init__(self) -> None:
        self._amaxes: dict[str, float] = {}

    def measure(self) -> None:
        """Measure the amax of weights that share a scale per tensor; call it when the weights have their final form."""
        for module, part in self.parts.items():
            if not bool(self.weights[module].isfinite().all()):
                raise NonFiniteError(f"{module}.weight", "it holds NaN or Inf; the checkpoint is damaged")
            if part.scheme.weight.needs_tensor_amax:
                amax = float(self.weights[module].abs().amax())
                self._amaxes[part.group] = max(self._amaxes.get(part.group, 0.0), amax)

    def round_to_nearest(self) -> None:
        """Replace every weight of the model by its nearest codes, without recording them."""
        for module, part in self.parts.items():
            self.weights[module].copy_(self._grid(module, part).nearest.dequantize())

    def round_group(
        self, modules: Sequence[str], statistics: Statistics, held_out: Rows | None, facts: Mapping[str, Any]
    ) -> None:
        """Round the weights that share an input."""
        by_spec: dict[WeightSpec, list[str]] = {}
        for module in modules:
            if module in self.parts:
                by_spec.setdefault(self.parts[module].scheme.weight, []).append(module)
        if not by_spec:
            return
        inputs = SharedInput(statistics, held_out, modules[0])
        for members in by_spec.values():
            grids = [self._grid(module, self.parts[module]) for module in members]
            rounded = self.method.round([self.weights[module].float().cpu() for module in members], grids, inputs)
            unusual = _unusual(inputs.feedback) if self.method.needs_data else {}
            details = {**rounded.details, **facts, **unusual}
            for module, grid, candidate in zip(members, grids, rounded.weights, strict=True):
                self._choose(module, grid, candidate, held_out, details)

    def _choose(
        self, module: str, grid: Grid, candidate: QuantizedTensor, held_out: Rows | None, facts: Mapping[str, Any]
    ) -> None:
        """Take the codes of the method, or the nearest ones if those lose less on held-out text."""
        weight = self.weights[module]
        taken, method = candidate, self.method.name
        row: dict[str, Any] = {"module": module, **facts}
        if held_out is not None and len(held_out.inputs) >= _FEWEST_HELD_OUT:
            errors = output_errors(weight.float().cpu(), [grid.nearest, candidate], held_out)
            row |= {"nearest_error": errors[0], "method_error": errors[1]}
            if errors[1] > errors[0]:
                taken, method = grid.nearest, "nearest"
        dequantized = taken.dequantize()
        row |= {"method": method, "stats": asdict(error_of(weight.cpu(), taken))}
        weight.copy_(dequantized)
        self.rows.append(row)
        names = self.parts[module].tensors
        self.tensors[names.codes.name] = tensor_bytes(taken.codes)
        self.tensors[names.scale.name] = tensor_bytes(taken.scale)
        if names.global_scale is not None:
            assert taken.global_scale is not None
            self.tensors[names.global_scale.name] = tensor_bytes(taken.global_scale)

    def _grid(self, module: str, part: Part) -> Grid:
        amax = self._amaxes.get(part.group)
        return Grid.of(self.weights[module].cpu(), part.scheme.weight, amax, self.moments.get(module))


def _unusual(feedback: Feedback) -> dict[str, Any]:
    """Return what the report says of a Hessian that is singular or has columns without input."""
    facts: dict[str, Any] = {"damping": feedback.damping} if feedback.damping > DAMPING else {}
    return facts | ({"dead_columns": feedback.dead} if feedback.dead else {})


def output_errors(weight: Tensor, candidates: Sequence[QuantizedTensor], held_out: Rows) -> list[float]:
    """Return the relative squared error of the outputs of each candidate on held-out inputs."""
    inputs = held_out.inputs
    original = times(held_out.reference, weight.T.contiguous())
    target = original if held_out.residual is None else original + held_out.residual
    energy = float(original.square().sum()) or 1.0
    outputs = (times(inputs, candidate.dequantize().T.contiguous()) for candidate in candidates)
    return [float((target - output).square().sum()) / energy for output in outputs]


def tensor_bytes(tensor: Tensor) -> Bytes:
    data: Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(data)


@dataclass(frozen=True)
class PlannedWeights:
    """The weights of a plan that are rounded with data, one layer after the other."""

    plan: QuantizationPlan
    config: Mapping[str, Any]  # that of the model
    method: Method  # chooses the codes
    folds: bool  # whether scales of input channels are folded

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        return {tensor.source.name: tensor.source for tensor in self.plan.tensors}

    @cached_property
    def parts(self) -> dict[str, tuple[str, Part]]:
        """Module -> its source tensor, and its part of that."""
        return {part.module: (tensor.source.name, part) for tensor in self.plan.tensors for part in tensor.parts}

    def views(self, stack: LayerStack, index: int) -> dict[str, Tensor]:
        """Return the tensors of a layer in the model, by name in the checkpoint."""
        return layer_tensors(stack.model, stack.weights.assignments(index), self.infos)

    def rounding(self, views: Mapping[str, Tensor], stages: Sequence[Stage]) -> LayerRounding:
        modules = {module for stage in stages for expert in stage.experts for module in expert}
        chosen, weights = {}, {}
        for module in sorted(modules & self.parts.keys()):
            source, part = self.parts[module]
            if source in views:
                chosen[module], weights[module] = part, part_view(views[source], part)
        return LayerRounding(self.method, chosen, weights)

    def fold(self, index: int, views: Mapping[str, Tensor], stages: Sequence[Stage], sample: FoldSample) -> LayerFold:
        """Fold scales in a layer, if the options say so, and return what was folded."""
        marker = f".{index}."
        name = next(iter(views), "")
        prefix = name[: name.index(marker)] + marker[:-1] if marker in name else ""
        fold = LayerFold(prefix, self.infos, self.config, stages, self.parts, views)
        if self.folds and prefix:
            fold.run(sample)
        return fold

    def result(self, rounding: LayerRounding, fold: LayerFold, **record: Any) -> ArrayContent:
        """Return the tensors of a layer that rounding and folds changed, by name in the output, and the record."""
        quantized = {source for source, _ in self.parts.values()}
        tensors = dict(rounding.tensors)
        tensors |= {name: tensor_bytes(fold.views[name]) for name in sorted(fold.changed) if name not in quantized}
        return ArrayContent({"weights": rounding.rows, "folds": fold.records, **record}, tensors)
