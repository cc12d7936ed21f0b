"""The empty transformers model of a checkpoint, and the parameter that each name in the checkpoint becomes.

The names follow the tables of transformers >= 5. Only this module calls its functions for that, which are not stable,
as transformers 5.10 to 5.23 do. Parameters lie on the meta device, and no code of a checkpoint is run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, FusedTensor, SingleExpert
from minifloat.model.runtime.config import plain_config

_STACK: list[tuple[type, int | None]] = [(MergeModulelist, 0)]
_STACK_AND_JOIN = [*_STACK, (Concatenate, 1)]


class ExpertStack:
    """Our conversion of single experts, which servers read, for models whose plain checkpoints have fused experts."""

    def __init__(self, fused: FusedTensor, transposed: bool) -> None:
        self.fused, self.transposed = fused, transposed
        self.source_patterns = list(fused.linears)

    def stack(self, experts: Iterable[Sequence[Tensor]]) -> Tensor:
        """Return the parameter from the weights ``[N, K]`` of each expert, in the order of their rows."""
        stacked = torch.stack([torch.cat(list(parts)) for parts in experts])
        return stacked.mT.contiguous() if self.transposed else stacked


@dataclass
class Assignment:
    """The tensors of a checkpoint that together become one parameter (or several, if a conversion cuts a tensor)."""

    target: str
    converter: WeightConverter | ExpertStack | None = None
    sources: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of all parameters that the tensors become; `target` is the first."""
        if not isinstance(self.converter, WeightConverter):
            return (self.target,)
        first, *others = self.converter.target_patterns
        return (self.target, *(self.target.replace(first, other, 1) for other in others))

    def expert_parts(self) -> list[list[str]] | None:
        """Return for each expert the sources whose rows follow each other; None if the conversion is another."""
        if self.converter is None:
            return None
        if isinstance(self.converter, WeightConverter) and _operations(self.converter) not in (_STACK, _STACK_AND_JOIN):
            return None
        columns = [
            [source for source, matched in zip(self.sources, self.patterns, strict=True) if matched == pattern]
            for pattern in self.converter.source_patterns
        ]
        if len({len(column) for column in columns}) != 1:
            return None
        return [list(parts) for parts in zip(*columns, strict=True)]

    @property
    def transposed(self) -> bool:
        return isinstance(self.converter, ExpertStack) and self.converter.transposed

    def convert(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the parameters by name, converted from the tensors that `read` returns for the names in `sources`."""
        if self.converter is None:
            return {self.target: read(self.sources[0])}
        if isinstance(self.converter, ExpertStack):
            return {
                self.target: self.converter.stack([read(part) for part in parts] for parts in self.expert_parts() or ())
            }
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.target, source, pattern, _reader(read, source))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _reader(read: Callable[[str], Tensor], source: str) -> Any:
    """Return a function that reads a tensor when the conversion needs it."""
    return lambda: read(source)


def _operations(converter: WeightConverter) -> list[tuple[type, int | None]]:
    return [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]


def assign(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Assignment], list[str]]:
    """Return the parameter that each tensor of a checkpoint becomes."""
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    family = _family_of(model)
    # First transformers' tables, then the name as it is (of a model saved by its own names).
    attempts = [(renamings, converters), ([], [])]
    assignments: dict[str, Assignment] = {}
    surplus = []
    for name in sorted(names, key=dot_natural_key):
        for attempt in attempts:
            target, pattern = rename_source_key(name, *attempt, model.base_model_prefix, expected)
            if target in expected:
                converter = next((entry for entry in reversed(attempt[1]) if pattern in entry.source_patterns), None)
                entry = assignments.setdefault(target, Assignment(target, converter))
                entry.sources.append(name)
                entry.patterns.append(pattern or name)
                break
        else:
            single = family.single_expert(name.removesuffix(".weight"))
            target = "" if single is None else _fused_target(single, model, renamings, converters, expected)
            if single is None or not target:
                surplus.append(name)
                continue
            stack = ExpertStack(single.fused, _is_transposed(single.fused, model, target))
            entry = assignments.setdefault(target, Assignment(target, stack))
            entry.sources.append(name)
            entry.patterns.append(single.fused.linears[single.position])
    return list(assignments.values()), surplus


def _family_of(model: PreTrainedModel) -> Family:
    text = model.config.get_text_config()
    return family_of({"model_type": model.config.model_type, "text_config": {"model_type": text.model_type}})


def _fused_target(
    single: SingleExpert,
    model: PreTrainedModel,
    renamings: list[WeightRenaming],
    converters: list[WeightConverter],
    expected: dict[str, Tensor],
) -> str:
    """Return the parameter that transformers makes of the tensor of fused experts; empty if there is none."""
    name = f"{single.parent}{single.fused.name}"
    for attempt in ((renamings, converters), ([], [])):
        target: str = rename_source_key(name, *attempt, model.base_model_prefix, expected)[0]
        if target in expected:
            return target
    return ""


def _is_transposed(fused: FusedTensor, model: PreTrainedModel, target: str) -> bool:
    """Return whether a parameter of stacked experts is ``[E, K, N]``."""
    owner = model.get_submodule(target.rpartition(".")[0])
    return bool(getattr(owner, "is_transposed", fused.transposed))


def keeps_float32(model: PreTrainedModel, dtype: Any) -> re.Pattern[str] | None:
    """Return the pattern of the parameters that stay float32 although the model has `dtype`; None if there are none."""
    plan = model._get_dtype_plan(dtype)
    return re.compile("|".join(name.replace("*", ".*") for name in plan)) if plan else None


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a checkpoint with its parameters on the meta device."""
    config = plain_config(checkpoint)
    try:
        with init_empty_weights(include_buffers=False):
            cls = _named_class(checkpoint, config)
            build: Any = AutoModelForCausalLM.from_config if cls is None else cls._from_config
            model: PreTrainedModel = build(config, dtype=dtype)
            return model
    except Exception as error:  # whatever a model's constructor makes of numbers that do not fit
        raise ConfigError(
            checkpoint.path / CONFIG_FILE, f"transformers {transformers.__version__} cannot build this model: {error}"
        ) from error


def _named_class(checkpoint: Checkpoint, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the first class under ``architectures`` that transformers has for this config and that generates text."""
    for name in checkpoint.config.get("architectures") or ():
        cls = getattr(transformers, str(name), None)
        if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel):
            continue
        if cls.config_class is type(config) and cls.can_generate():
            return cls
    return None


def replace_forward(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    former = module.__dict__.get("forward")
    module.forward = forward

    def undo() -> None:
        del module.forward
        if former is not None:
            module.forward = former

    return undo
