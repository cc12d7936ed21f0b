"""From the names in a checkpoint to the parameters of a transformers model.

transformers >= 5 renames and converts while it loads: Mixtral's ``block_sparse_moe`` becomes ``mlp``, the experts of a
layer are stacked into one parameter, fused projections are cut. Its tables (`conversion_mapping.py`) are the only
record of that, so they are asked and not repeated. This module is the only one that touches those functions; they
have no promise of stability, and are called here as transformers 5.10 to 5.23 call them themselves.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass
class Assignment:
    """The tensors of a checkpoint that together make one parameter (or, where a conversion cuts one, several).

    Attributes:
        target: Name of the parameter or buffer; of the first one where there are several.
        sources: Names of the tensors, experts in the order of their index.
        patterns: Which source pattern of the converter each of them matched; empty without a converter.
        converter: transformers' conversion, None where the tensor is taken as it is.
    """

    target: str
    converter: WeightConverter | None = None
    sources: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    def expert_parts(self) -> list[list[str]] | None:
        """Of each expert the sources that follow each other along its rows; None where that is not the conversion."""
        if self.converter is None or not _stacks_experts(self.converter.operations):
            return None
        columns = [
            [source for source, matched in zip(self.sources, self.patterns, strict=True) if matched == pattern]
            for pattern in self.converter.source_patterns
        ]
        if len({len(column) for column in columns}) != 1:
            return None
        return [list(parts) for parts in zip(*columns, strict=True)]

    def convert(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters by name, made from tensors that `read` returns for the names in `sources`.

        Raises:
            Exception: Whatever transformers' conversion raises where the tensors do not fit it.
        """
        if self.converter is None:
            return {self.target: read(self.sources[0])}
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.target, source, pattern, _reader(read, source))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _reader(read: Callable[[str], Tensor], source: str) -> Any:
    """A tensor that is read when the conversion asks for it."""
    return lambda: read(source)


def _stacks_experts(operations: list[Any]) -> bool:
    """Whether a conversion stacks experts along dimension 0 and then at most joins their parts along the rows."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def assign(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Assignment], list[str]]:
    """Say for each tensor of a checkpoint where in the model it goes.

    Args:
        model: On the meta device is enough.
        names: The tensors, as a plain checkpoint would name them (``<module>.weight`` for a quantized weight).

    Returns:
        The assignments, and the names for which the model has no place.
    """
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    assignments: dict[str, Assignment] = {}
    homeless = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            homeless.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        entry = assignments.setdefault(target, Assignment(target, converter))
        entry.sources.append(name)
        if pattern is not None:
            entry.patterns.append(pattern)
    return list(assignments.values()), homeless


def split_ignorable(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Part the names for which the model has no place into those that may be dropped and those that may not.

    Droppable are what the model class itself declares (`_keys_to_ignore_on_load_unexpected`), the rotary and position
    buffers of old checkpoints, which the model computes, and the layers for multi-token prediction, which lie after the
    last layer.
    """
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"]
    config = model.config.get_text_config()
    first = getattr(config, "num_hidden_layers", 0)
    for index in range(getattr(config, "num_nextn_predict_layers", 0) or 0):
        patterns.append(rf"(^|\.)layers\.{first + index}\.")
    droppable = re.compile("|".join(f"({pattern})" for pattern in patterns))
    parted: tuple[list[str], list[str]] = ([], [])
    for name in names:
        parted[0 if droppable.search(name) else 1].append(name)
    return parted


def keeps_float32(model: PreTrainedModel, dtype: Any) -> re.Pattern[str] | None:
    """The parameters that the model class wants in float32 although the model has `dtype`; None if there are none."""
    plan = model._get_dtype_plan(dtype)
    return re.compile("|".join(name.replace("*", ".*") for name in plan)) if plan else None
