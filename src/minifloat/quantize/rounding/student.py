"""The original model run with trainable weights in place of its own: codes as latent weights, and norms.

A latent is a float in units of the scale that is rounded to a code; the scales stay as they are.

Source: Bengio et al. (arXiv 1308.3432), section 4, for the straight-through estimator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.model import CalibrationModel
from minifloat.checkpoint import TensorInfo
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.model.runtime.names import Assignment
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.numerics.cast import decode, encode, pack_nibbles, unpack_nibbles
from minifloat.numerics.formats import ElementFormat
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.layer_fold import (
    assignment_views,
    folded_weights,
    layer_tensors,
    parameter_of,
    part_view,
)
from minifloat.quantize.rounding.rounded_model import RoundedModel

#: Share of a cell that a latent may start in: at the edge, a change by one rounding error would change the code.
CELL_LIMIT = 0.9


@dataclass(frozen=True)
class Cells:
    """The intervals of values that round to each code of a format; the outermost ones are made symmetric."""

    lower: Tensor  # float32, one entry per code: the lower end, or NaN where the code is no number
    upper: Tensor
    step: Tensor
    top: float


@cache
def cells(element: ElementFormat) -> Cells:
    """Return the cells of a signed format of at most 8 bits."""
    values = torch.tensor(element.values, dtype=torch.float64)
    finite = values.isfinite()
    grid = torch.tensor(sorted({*values[finite].tolist()}), dtype=torch.float64)  # the two zeros are one
    middles = (grid[1:] + grid[:-1]) / 2
    last = (grid[-1] - grid[-2]) / 2
    edges = torch.cat([grid[:1] - last, middles, grid[-1:] + last])
    index = torch.searchsorted(grid, torch.where(finite, values, 0.0))
    lower, upper = (torch.where(finite, edges[index + end], torch.nan).float() for end in (0, 1))
    return Cells(lower, upper, upper - lower, float(edges[-1]))


class LatentWeight:
    """A quantized weight that can be trained."""

    def __init__(self, quantized: QuantizedTensor, weight: Tensor, device: torch.device) -> None:
        self.start = quantized
        self._table = cells(quantized.spec.element)
        self.top = self._table.top
        self.scales = quantized.block_scale().to(device)
        codes = _unpacked(quantized).to(device).to(torch.int32)
        chosen = decode(codes.to(torch.uint8), quantized.spec.element)
        lower, upper = (table.to(device)[codes] for table in (self._table.lower, self._table.upper))
        low = chosen - CELL_LIMIT * (chosen - lower)
        high = chosen + CELL_LIMIT * (upper - chosen)
        self.values = torch.minimum(torch.maximum(weight.to(device).float() / self._factors(), low), high)
        self.values.requires_grad_(True)
        self.step = float(self._table.step.to(device)[codes].mean())

    def weight(self) -> Tensor:
        """Return the weight of the current codes, float32 ``[N, K]``."""
        with torch.no_grad():
            return decode(self.codes(), self.start.spec.element).mul_(self._factors())

    def set_gradient(self, of_weight: Tensor) -> None:
        """Set the gradient of the latents from that of the weight, ``[N, K]`` in any dtype."""
        values = self.values.detach()
        self.values.grad = (of_weight.float() * self._factors()).mul_(values.abs() <= self.top)

    def clamp(self) -> None:
        """Move latents beyond the outermost cells back to their edge, where gradients pass."""
        with torch.no_grad():
            self.values.clamp_(-self.top, self.top)

    def codes(self) -> Tensor:
        """Return the current codes, uint8 ``[N, K]``, one per byte."""
        return encode(self.values.detach(), self.start.spec.element)

    def quantized(self) -> QuantizedTensor:
        """Return the weight with the current codes, on the CPU."""
        codes, start = self.codes().cpu(), self.start
        packed = pack_nibbles(codes) if start.packed else codes
        return QuantizedTensor(start.spec, start.shape, packed, start.scale, start.global_scale)

    def restore(self, weight: QuantizedTensor) -> None:
        """Return to the codes of a weight."""
        with torch.no_grad():
            self.values.copy_(decode(_unpacked(weight), weight.spec.element))

    def changed_codes(self, weight: QuantizedTensor) -> int:
        """Return the number of elements whose code differs from the first one; the sign of zero counts as none."""
        element = self.start.spec.element
        return int((decode(_unpacked(weight), element) != decode(_unpacked(self.start), element)).sum())

    def _factors(self) -> Tensor:
        return expand(self.scales, self.start.spec.granularity, self.start.shape)


def _unpacked(quantized: QuantizedTensor) -> Tensor:
    return unpack_nibbles(quantized.codes) if quantized.packed else quantized.codes


@dataclass(frozen=True)
class _Composition:
    """A parameter of the model that is put together from latents."""

    assignment: Assignment
    base: Tensor
    infos: Mapping[str, TensorInfo]
    parts: Sequence[tuple[str, Part]]
    latents: Sequence[LatentWeight]

    def views(self, parameter: Tensor) -> list[Tensor]:
        """Return the view of each latent's weight in a tensor of the parameter's shape."""
        views = assignment_views(self.assignment, parameter, self.infos)
        return [part_view(views[source], part) for source, part in self.parts]

    def parameter(self) -> Tensor:
        """Return the parameter with the weights of the current codes."""
        parameter = self.base.clone()
        for view, latent in zip(self.views(parameter), self.latents, strict=True):
            view.copy_(latent.weight())
        return parameter

    def set_gradients(self, of_parameter: Tensor) -> None:
        """Set the gradients of the latents from that of the parameter; they pass through the rounding."""
        for view, latent in zip(self.views(of_parameter), self.latents, strict=True):
            latent.set_gradient(view)


class Student:
    """A model whose quantized weights and norms can be trained."""

    def __init__(self, model: CalibrationModel, plan: QuantizationPlan, rounded: RoundedModel) -> None:
        loader = model.loader()
        self._assignments = loader.assignments()
        loader.run()
        self.model = loader.model.train(False)
        nn.Module.to(self.model, loader.device)  # the buffers that the model computed itself
        self.device = loader.device
        self._infos = {tensor.source.name: tensor.source for tensor in plan.tensors}
        originals = layer_tensors(self.model, self._assignments, self._infos)
        self.latents: dict[str, LatentWeight] = {}
        self.weights: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}
        self._compositions: list[_Composition] = []
        self._constants: dict[str, Tensor] = {}
        self._norm_targets: dict[str, tuple[str, torch.dtype]] = {}
        folded = folded_weights(model.checkpoint.config, self._infos, rounded, originals)
        parts: dict[str, list[Part]] = {t.source.name: list(t.parts) for t in plan.tensors}
        for assignment in self._assignments:
            self._add(assignment, originals | folded, parts, rounded)

    def _add(
        self,
        assignment: Assignment,
        originals: Mapping[str, Tensor],
        parts: Mapping[str, Sequence[Part]],
        rounded: RoundedModel,
    ) -> None:
        """Make the latents, the norm or the changed constant of one parameter."""
        base = parameter_of(self.model, assignment)
        present = [name for name in assignment.sources if name in originals]
        chosen = [(name, part) for name in present for part in parts.get(name, ()) if part.module in rounded.weights]
        copies = [name for name in present if not parts.get(name) and name in rounded]
        if copies or chosen:
            base = base.detach().clone() if copies else base
            views = assignment_views(assignment, base, self._infos)
            for name in copies:
                views[name].copy_(self._plain(name, rounded))
        for name, part in chosen:
            weight = part_view(originals[name], part)
            self.weights[part.module] = weight
            self.latents[part.module] = LatentWeight(rounded.quantized(part), weight, self.device)
        if chosen:
            latents = [self.latents[part.module] for _, part in chosen]
            self._compositions.append(_Composition(assignment, base, self._infos, chosen, latents))
        elif self._is_norm(assignment, base):
            name = assignment.sources[0]
            self.norms[name] = base.detach().float().clone().requires_grad_(True)
            self._norm_targets[name] = (assignment.target, base.dtype)
        elif copies:
            self._constants[assignment.target] = base

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of the current state that differ from the model's, by name in the model."""
        changed = {each.assignment.target: each.parameter().requires_grad_(True) for each in self._compositions}
        for name, (target, dtype) in self._norm_targets.items():
            changed[target] = self._stored_norm(name).to(dtype).requires_grad_(True)
        return self._constants | changed

    def set_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the gradients of latents and norms from those of `parameters`; one that has none counts as zero."""
        for composition in self._compositions:
            parameter = parameters[composition.assignment.target]  # no gradient: an expert that the model skips
            composition.set_gradients(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, (target, _) in self._norm_targets.items():
            gradient = parameters[target].grad
            self.norms[name].grad = None if gradient is None else gradient.float()

    def logits(self, ids: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the logits ``[B, T, V]`` with the given parameters for token ids ``[B, T]``."""
        kwargs = {"input_ids": ids, "use_cache": False}
        output: Any = torch.func.functional_call(self.model, dict(parameters), (), kwargs, tie_weights=False)
        logits: Tensor = output.logits
        return logits

    def original_logits(self, ids: Tensor) -> Tensor:
        """Return the logits ``[B, T, V]`` of the original model for token ids ``[B, T]``."""
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits

    def stored_norms(self) -> dict[str, Tensor]:
        """Return a copy of the current norms by name, on the CPU, in the dtype in which the checkpoint stores them."""
        return {name: self._stored_norm(name).cpu().clone() for name in self.norms}

    def restore(self, weights: Mapping[str, QuantizedTensor], norms: Mapping[str, Tensor]) -> None:
        """Return to the codes and norms of an earlier state."""
        for module, weight in weights.items():
            self.latents[module].restore(weight)
        with torch.no_grad():
            for name, norm in norms.items():
                self.norms[name].copy_(norm)

    def _stored_norm(self, name: str) -> Tensor:
        return self.norms[name].detach().to(TORCH_DTYPES[self._infos[name].dtype])

    def _is_norm(self, assignment: Assignment, parameter: Tensor) -> bool:
        owner, _, leaf = assignment.target.rpartition(".")
        return (
            leaf == "weight"
            and parameter.ndim == 1
            and assignment.converter is None
            and "norm" in type(self.model.get_submodule(owner)).__name__.lower()
            and self._infos[assignment.sources[0]].dtype in TORCH_DTYPES
        )

    def _plain(self, name: str, rounded: RoundedModel) -> Tensor:
        """Return a tensor that stays in 16 bits, with what was folded into it."""
        info, data = self._infos[name], rounded.read(name)
        return torch.from_numpy(data).view(TORCH_DTYPES[info.dtype]).reshape(info.shape).to(self.device)
