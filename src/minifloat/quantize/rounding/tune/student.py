"""`Student`: the original model run with the weights that are tuned in place of its own.

Both models share all other weights, so that memory holds the model once. Experts that the model stacks in one
parameter are put together from the latents of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.model import CalibrationModel
from minifloat.checkpoint import TensorInfo
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.model.runtime.names import Assignment
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.quantize.rounding.fold_record import folded_weights
from minifloat.quantize.rounding.layer_tensors import assignment_views, layer_tensors, parameter_of, part_view
from minifloat.quantize.rounding.rounded_model import Bytes, RoundedModel
from minifloat.quantize.rounding.tune.latent import LatentWeight


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
        """Return the parameters of the current state that differ from the model's, by name in the model.

        They require gradients, which `set_gradients` hands on. Any number of passes may use them.
        """
        changed = {each.assignment.target: each.parameter().requires_grad_(True) for each in self._compositions}
        for name, (target, dtype) in self._norm_targets.items():
            changed[target] = self._stored_norm(name).to(dtype).requires_grad_(True)
        return self._constants | changed

    def set_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Set the gradients of latents and norms from those of `parameters`; one that has none counts as zero.

        A parameter has none if no pass used it: an expert layer that the model skips.
        """
        for composition in self._compositions:
            parameter = parameters[composition.assignment.target]
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

    def _stored_norm(self, name: str) -> Tensor:
        return self.norms[name].detach().to(TORCH_DTYPES[self._infos[name].dtype])

    def _is_norm(self, assignment: Assignment, parameter: Tensor) -> bool:
        """Return whether a parameter is the weight of a norm that is a tensor of the checkpoint."""
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
        return tensor_of(data, TORCH_DTYPES[info.dtype], info.shape).to(self.device)


def tensor_of(data: Bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return bytes of an output tensor as a tensor."""
    return torch.from_numpy(data).view(dtype).reshape(tuple(shape))
