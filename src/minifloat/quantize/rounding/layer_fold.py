"""Folds scales in one layer: asks for exponents at each site of the layer and changes the layer's tensors.

The inputs are those of the original model. After the fold, the inputs of the stages behind a changed producer are
smaller by the same powers of two; `LayerFold.scaled` says by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.folding import FoldPart, FoldSite, fold_sites, why_not_fold
from minifloat.model.plan.tensor_plan import Part
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.quantize.rounding.fold import apply_exponents, channel_classes, choose_exponents, exponent_limits
from minifloat.quantize.rounding.fold_loss import powers_of_two
from minifloat.quantize.rounding.fold_record import exponents_name
from minifloat.quantize.rounding.layer_tensors import part_view
from minifloat.quantize.rounding.stages import Stage
from minifloat.quantize.rounding.taps import Reading

#: Experts whose weights judge the fold of the norm that they all read.
_MOST_EXPERTS = 8
#: Fewer sampled inputs than this say too little about the input channels of an expert.
_FEWEST_ROWS = 32

#: Returns sampled inputs of a stage (by number) and slot, from calibration text (False) or held-out text (True).
SampleInputs = Callable[[int, int, bool], Tensor | None]


@dataclass
class LayerFold:
    """The folds of one layer.

    Attributes:
        exponents: The exponents of each site that was folded, int8 ``[K]``, by the name of their entry in the file.
    """

    prefix: str
    infos: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    stages: Sequence[Stage]
    parts: Mapping[str, tuple[str, Part]]
    views: Mapping[str, Tensor]
    records: list[dict[str, Any]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    exponents: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._exponents: dict[tuple[int, int], Tensor] = {}
        self._slots = {
            module: (number, slot)
            for number, stage in enumerate(self.stages)
            for slot, modules in enumerate(stage.slots)
            for module in modules
        }
        self._modules: dict[tuple[str, int], list[str]] = {}
        for module, (source, part) in self.parts.items():
            if source in self.views:
                self._modules.setdefault((source, part.matrix), []).append(module)

    @property
    def by_slot(self) -> Mapping[tuple[int, int], Tensor]:
        """The exponents by stage and slot; experts that share their input have one entry, slot 0."""
        return self._exponents

    def run(self, sample: SampleInputs) -> None:
        """Fold at every site where that lowers the error on held-out text."""
        reason = why_not_fold(self.prefix, self.infos, self.config)
        if reason:
            self.records.append({"layer": self.prefix, "folded": False, "reason": reason})
        for site in fold_sites(self.prefix, self.infos, self.config):
            if self._is_reachable(site):
                self._fold(site, sample)

    def scaled(self, number: int, reading: Reading) -> Reading:
        """Return the inputs of a stage in the original model as they are after the folds."""
        stage = self.stages[number]
        if stage.outer:
            found = {slot: e for (of, slot), e in self._exponents.items() if of == number}
            if not found or reading.slots is None:
                return reading
            none = torch.zeros(stage.width, dtype=torch.int32)
            table = torch.stack([found.get(slot, none) for slot in range(len(stage.slots))])
            factors = powers_of_two(-table)[reading.slots]
        else:
            exponents = self._exponents.get((number, 0))
            if exponents is None:
                return reading
            factors = powers_of_two(-exponents)
        return replace(reading, inputs=reading.inputs * factors.to(reading.inputs))

    def exponents_of(self, number: int, slot: int) -> Tensor | None:
        """Return the exponents by which the inputs of a stage and slot are smaller now; None: they are as before."""
        return self._exponents.get((number, slot if self.stages[number].outer else 0))

    def _is_reachable(self, site: FoldSite) -> bool:
        """Return whether every tensor of a site is in the model, and as the checkpoint stores it if it is copied.

        Weights that are quantized are rounded from the model's values, whatever dtype they are stored in.
        """
        quantized = {source for source, _ in self.parts.values()}
        return all(
            name in self.views and (name in quantized or self.views[name].dtype == TORCH_DTYPES[self.infos[name].dtype])
            for name in site.tensors
        )

    def _readers(self, site: FoldSite) -> list[str]:
        """Return the modules to quantize that read the scaled input."""
        return [module for part in site.readers for module in self._modules_of(part)]

    def _modules_of(self, part: FoldPart) -> list[str]:
        experts = (
            [part.expert] if part.expert is not None else sorted({m for s, m in self._modules if s == part.tensor})
        )
        return [module for expert in experts for module in self._modules.get((part.tensor, expert), [])]

    def _fold(self, site: FoldSite, sample: SampleInputs) -> None:
        modules = self._readers(site)
        places = {self._slots[module] for module in modules if module in self._slots}
        if not places or any(module not in self._slots for module in modules):
            return
        number, slot = min(places)
        inputs, held_out = sample(number, slot, False), sample(number, slot, True)
        if inputs is None or held_out is None or min(len(inputs), len(held_out)) < _FEWEST_ROWS:
            return
        judged = self._judged(modules)
        groups = {group: index for index, group in enumerate(dict.fromkeys(self.parts[m][1].group for m in judged))}
        tensors = {name: self.views[name].cpu() for name in site.tensors}
        scheme = self.parts[judged[0]][1].scheme
        choice = choose_exponents(
            [self._weight(module) for module in judged],
            scheme.weight,
            inputs,
            held_out,
            activation=scheme.activation,
            classes=channel_classes(site),
            limits=exponent_limits(site, tensors),
            shares=[groups[self.parts[module][1].group] for module in judged],
        )
        record: dict[str, Any] = {"site": site.producers[0].tensor, "kind": site.kind.value, "folded": choice.folds}
        record |= {"alpha": choice.alpha, "loss_without": choice.loss_without, "loss_with": choice.loss_with}
        if site.producers[0].expert is not None:
            record["expert"] = site.producers[0].expert
        self.records.append(record)
        if not choice.folds:
            return
        for name, tensor in apply_exponents(site, tensors, choice.exponents).items():
            self.views[name].copy_(tensor)
            self.changed.add(name)
        for place in places:
            stage_slot = place if self.stages[place[0]].outer else (place[0], 0)
            self._exponents[stage_slot] = choice.exponents
        self.exponents[exponents_name(site)] = choice.exponents.to(torch.int8)

    def _judged(self, modules: Sequence[str]) -> list[str]:
        """Return the modules whose weights judge a fold: all, or those of some experts."""
        slots = sorted({self._slots[module] for module in modules})
        step = max(-(-len(slots) // _MOST_EXPERTS), 1)
        chosen = set(slots[::step])
        return [module for module in modules if self._slots[module] in chosen]

    def _weight(self, module: str) -> Tensor:
        source, part = self.parts[module]
        return part_view(self.views[source], part).float().cpu()
