"""Folds scales in one layer: asks for exponents at each site of the layer and changes the layer's tensors.

Tensors of the checkpoint are views of the parameters of a transformers model, so that a change of one changes the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.family import FoldKind
from minifloat.model.architecture.folding import FoldPart, FoldSite, fold_sites, why_not_fold
from minifloat.model.plan.tensor_plan import Part
from minifloat.model.runtime.names import Assignment
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.quantize.rounding.channel_factors import channel_factors, takes_factors
from minifloat.quantize.rounding.folding import (
    apply_exponents,
    channel_classes,
    choose_exponents,
    exponent_limits,
    powers_of_two,
)
from minifloat.quantize.rounding.stage_inputs import StageInputs, StoredStageInputs
from minifloat.quantize.rounding.stages import Stage
from minifloat.quantize.rounding.texts import SplitBatches


def layer_tensors(
    model: nn.Module, assignments: Iterable[Assignment], infos: Mapping[str, TensorInfo]
) -> dict[str, Tensor]:
    """Return the views of a layer's tensors by name in the checkpoint."""
    views: dict[str, Tensor] = {}
    for assignment in assignments:
        owner_path, _, leaf = assignment.target.rpartition(".")
        parameter = getattr(model.get_submodule(owner_path), leaf).data
        views |= _views(assignment, parameter, infos)
    return views


def _views(assignment: Assignment, parameter: Tensor, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    """Return the views of the parameter that an assignment fills, by name in the checkpoint."""
    if assignment.converter is None:
        return {assignment.sources[0]: parameter}
    views: dict[str, Tensor] = {}
    for expert, sources in enumerate(assignment.expert_parts() or ()):
        matrix, first = parameter[expert], 0
        rows = sum(infos[source].shape[0] for source in sources)
        matrix = matrix if matrix.shape[0] == rows else matrix.T
        for source in sources:
            stop = first + infos[source].shape[0]
            views[source], first = matrix[first:stop], stop
    return views


def part_view(tensor: Tensor, part: Part) -> Tensor:
    """Return the weight ``[N, K]`` of a part, as a view of its source tensor."""
    if tensor.ndim > 2:
        tensor = tensor[part.matrix].T if part.transposed else tensor[part.matrix]
    return tensor[part.first_row : part.first_row + part.shape[0]]


#: Rows of a sample of calibration text and of held-out text.
_ROWS = {False: 1024, True: 512}
#: Batches that the rows are spread over.
_BATCHES = 32


class FoldSample:
    """Returns sampled inputs of a stage and expert, from calibration text or from held-out text."""

    def __init__(self, stage_inputs: StoredStageInputs, stages: Sequence[Stage], texts: SplitBatches) -> None:
        self._readings, self._stages = stage_inputs, stages
        self._numbers = {False: range(texts.first_chosen_on), True: range(texts.first_chosen_on, texts.first_reported)}
        self._by_expert: dict[tuple[int, bool], dict[int, Tensor]] = {}

    def __call__(self, number: int, expert: int, held_out: bool) -> Tensor | None:
        """Return rows ``[T, K]`` of the inputs; None if no token reached the expert."""
        if (number, held_out) not in self._by_expert:
            self._by_expert = {(number, held_out): self._read(number, held_out)} | {
                key: rows for key, rows in self._by_expert.items() if key[0] == number
            }
        return self._by_expert[number, held_out].get(expert if self._stages[number].outer else 0)

    def _read(self, number: int, held_out: bool) -> dict[int, Tensor]:
        """Return sampled rows of a stage by expert; of a stage whose experts share their input under expert 0."""
        numbers = self._numbers[held_out]
        chosen = numbers[:: max(len(numbers) // _BATCHES, 1)]
        per_batch = -(-_ROWS[held_out] // max(len(chosen), 1))
        rows: dict[int, list[Tensor]] = {}
        for batch in chosen:
            stage_input = self._readings.read(batch, number)
            if stage_input.experts is None:
                inputs = stage_input.inputs
                drawn = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(batch))
                rows.setdefault(0, []).append(inputs[drawn[:per_batch].sort().values])
                continue
            for expert in torch.unique(stage_input.experts).tolist():
                rows.setdefault(expert, []).append(stage_input.inputs[stage_input.experts == expert])
        return {expert: torch.cat(parts)[: _ROWS[held_out]].float() for expert, parts in rows.items()}


#: Experts whose weights judge the fold of the norm that they all read.
_MOST_EXPERTS = 8
#: Fewer sampled inputs than this say too little about the input channels of an expert.
_FEWEST_ROWS = 32


@dataclass
class LayerFold:
    prefix: str
    infos: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    stages: Sequence[Stage]
    parts: Mapping[str, tuple[str, Part]]
    views: Mapping[str, Tensor]
    records: list[dict[str, Any]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    rescaled: set[str] = field(default_factory=set)  # modules whose outputs have other scales than before
    output_factors: dict[str, Tensor] = field(default_factory=dict)  # what some outputs are divided by, by module

    def __post_init__(self) -> None:
        # Factors of the columns, float32 ``[K]``, by stage and expert; experts that share their input have one entry,
        # expert 0.
        self.by_expert: dict[tuple[int, int], Tensor] = {}
        self._places = {
            module: (number, expert)
            for number, stage in enumerate(self.stages)
            for expert, modules in enumerate(stage.experts)
            for module in modules
        }
        self._modules: dict[tuple[str, int], list[str]] = {}
        for module, (source, part) in self.parts.items():
            if source in self.views:
                self._modules.setdefault((source, part.matrix), []).append(module)

    def run(self, sample: FoldSample) -> None:
        """Fold at every site where that lowers the error on held-out text."""
        reason = why_not_fold(self.prefix, self.infos, self.config)
        if reason:
            self.records.append({"layer": self.prefix, "folded": False, "reason": reason})
        for site in fold_sites(self.prefix, self.infos, self.config):
            if reason := self._why_not_reachable(site):
                site_record = {"site": site.producers[0].tensor, "kind": site.kind.value}
                self.records.append({**site_record, "folded": False, "reason": reason})
            else:
                self._fold(site, sample)

    def scaled(self, number: int, stage_input: StageInputs) -> StageInputs:
        """Return the inputs of a stage in the original model as they are after the folds."""
        stage = self.stages[number]
        factors = self.by_expert.get((number, 0))
        if stage.outer:
            found = {expert: factors for (of, expert), factors in self.by_expert.items() if of == number}
            if not found or stage_input.experts is None:
                return stage_input
            none = torch.ones(stage.width)
            factors = torch.stack([found.get(expert, none) for expert in range(len(stage.experts))])
            factors = factors[stage_input.experts]
        if factors is None:
            return stage_input
        return replace(
            stage_input,
            inputs=(stage_input.inputs / factors.to(stage_input.inputs.device)).to(stage_input.inputs.dtype),
        )

    def _why_not_reachable(self, site: FoldSite) -> str:
        """Return why a tensor of a site cannot change: it is not in the model, or is copied in another dtype."""
        quantized = {source for source, _ in self.parts.values()}
        for name in site.tensors:
            what = name.removeprefix(self.prefix).lstrip(".")
            if name not in self.views:
                return f"{what} is not in the model that runs"
            stored, computed = TORCH_DTYPES[self.infos[name].dtype], self.views[name].dtype
            if name not in quantized and stored != computed:
                names = [str(dtype).removeprefix("torch.") for dtype in (stored, computed)]
                return f"{what} is copied in {names[0]}, and the model that runs has it rounded to {names[1]}"
        return ""

    def _modules_of(self, part: FoldPart) -> list[str]:
        experts = (
            [part.expert] if part.expert is not None else sorted({m for s, m in self._modules if s == part.tensor})
        )
        return [module for expert in experts for module in self._modules.get((part.tensor, expert), [])]

    def _fold(self, site: FoldSite, sample: FoldSample) -> None:
        modules = [module for part in site.readers for module in self._modules_of(part)]
        places = {self._places[module] for module in modules if module in self._places}
        if not places or any(module not in self._places for module in modules):
            return
        number, expert = min(places)
        inputs, held_out = sample(number, expert, False), sample(number, expert, True)
        if inputs is None or held_out is None or min(len(inputs), len(held_out)) < _FEWEST_ROWS:
            return
        judged = self._judged(modules)
        groups = {group: index for index, group in enumerate(dict.fromkeys(self.parts[m][1].group for m in judged))}
        tensors = {name: self.views[name].cpu() for name in site.tensors}
        scheme = self.parts[judged[0]][1].scheme
        choice = choose_exponents(
            [self._part(module)[0].float().cpu() for module in judged],
            scheme,
            inputs,
            held_out,
            classes=channel_classes(site),
            limits=exponent_limits(site, tensors),
            shares=[groups[self.parts[module][1].group] for module in judged],
        )
        record: dict[str, Any] = {"site": site.producers[0].tensor, "kind": site.kind.value}
        record |= {"alpha": choice.alpha, "loss_without": choice.loss_without, "loss_with": choice.loss_with}
        if site.producers[0].expert is not None:
            record["expert"] = site.producers[0].expert
        self.records.append(record)
        factors = powers_of_two(choice.exponents)
        if choice.folds:
            for name, tensor in apply_exponents(site, tensors, choice.exponents).items():
                self.views[name].copy_(tensor)
                self.changed.add(name)
            self.rescaled.update(module for part in site.producers for module in self._modules_of(part))
        if self._takes_factors(site):
            energy = (inputs / factors).square().mean(0)
            factors *= self._fold_columns(site, [self._part(module) for module in modules], energy)
        record["folded"] = bool((factors != 1).any())
        if not record["folded"]:
            return
        for place in places:
            place_of_input = place if self.stages[place[0]].outer else (place[0], 0)
            self.by_expert[place_of_input] = factors

    def moments(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return moments of the gradients of outputs, ``[blocks, B, B]`` by module, as they are after the folds."""
        scaled = dict(found)
        for module in found.keys() & self.output_factors.keys():
            factors = torch.ones(found[module].shape[:2])
            factors.view(-1)[: len(self.output_factors[module])] = self.output_factors[module]
            scaled[module] = found[module] * factors[:, :, None] * factors[:, None]
        return scaled

    def _takes_factors(self, site: FoldSite) -> bool:
        """Return whether all readers have formats that take factors, and a norm or an up_proj alone comes before."""
        producer, readers = site.producers[0], [self._modules_of(part) for part in site.readers]
        return (
            len(site.producers) == 1
            and all(readers)
            and all(takes_factors(self.parts[module][1].scheme.weight) for found in readers for module in found)
            and (site.kind is FoldKind.NORM or (site.kind is FoldKind.UP and self._is_one_module(producer)))
        )

    def _is_one_module(self, part: FoldPart) -> bool:
        return part.rows is None and part.expert is None and len(self._modules_of(part)) == 1

    def _fold_columns(self, site: FoldSite, readers: Sequence[tuple[Tensor, Part]], energy: Tensor) -> Tensor:
        """Fold factors into the columns that hold most of the error, and return them, float32 ``[K]``."""
        (producer,) = site.producers
        before = self.views[producer.tensor]
        norm = before.cpu() if site.kind is FoldKind.NORM else None
        factors = channel_factors([(weight.cpu(), part.scheme.weight) for weight, part in readers], energy, norm)
        columns = (factors != 1).nonzero()[:, 0].to(before.device)
        if not len(columns):
            return factors
        chosen = factors.to(before.device)[columns]
        for weight, _ in readers:
            weight[:, columns] = (weight[:, columns] * chosen).to(weight.dtype)
        before[columns] = (before[columns] / (chosen if norm is not None else chosen[:, None])).to(before.dtype)
        self.changed.update(site.tensors)
        if norm is None:
            self.output_factors[self._modules_of(producer)[0]] = factors
        return factors

    def _judged(self, modules: Sequence[str]) -> list[str]:
        """Return the modules whose weights judge a fold: all, or those of some experts."""
        experts = sorted({self._places[module] for module in modules})
        step = max(-(-len(experts) // _MOST_EXPERTS), 1)
        chosen = set(experts[::step])
        return [module for module in modules if self._places[module] in chosen]

    def _part(self, module: str) -> tuple[Tensor, Part]:
        """Return the view of a module's weight ``[N, K]``, and what becomes of it."""
        source, part = self.parts[module]
        return part_view(self.views[source], part), part
