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
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

_STACK: list[tuple[type, int | None]] = [(MergeModulelist, 0)]
_STACK_AND_JOIN = [*_STACK, (Concatenate, 1)]
_TRANSPOSE_TO_FIT = Transpose(1, 2, check_dims=True)

#: For models whose plain checkpoints have fused experts, so that transformers has no conversion from single ones
#: (Llama 4): quantized checkpoints have single ones all the same, because servers read them so.
_SINGLE_EXPERTS = [
    WeightConverter(
        [".experts.*.gate_proj.weight", ".experts.*.up_proj.weight"],
        ".experts.gate_up_proj",
        [MergeModulelist(dim=0), Concatenate(dim=1), _TRANSPOSE_TO_FIT],
    ),
    WeightConverter(".experts.*.down_proj.weight", ".experts.down_proj", [MergeModulelist(dim=0), _TRANSPOSE_TO_FIT]),
]


@dataclass
class Assignment:
    """The tensors of a checkpoint that together make one parameter (or, where a conversion cuts one, several).

    Attributes:
        target: Name of the parameter or buffer; of the first one where there are several.
        sources: Names of the tensors, experts in the order of their index.
        patterns: Which source pattern of the converter each of them matched; without a converter, its name.
        converter: transformers' conversion, None where the tensor is taken as it is.
    """

    target: str
    converter: WeightConverter | None = None
    sources: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    def expert_parts(self) -> list[list[str]] | None:
        """Of each expert the sources that follow each other along its rows; None where that is not the conversion."""
        if self.converter is None or _operations(self.converter) not in (_STACK, _STACK_AND_JOIN):
            return None
        columns = [
            [source for source, matched in zip(self.sources, self.patterns, strict=True) if matched == pattern]
            for pattern in self.converter.source_patterns
        ]
        if len({len(column) for column in columns}) != 1:
            return None
        return [list(parts) for parts in zip(*columns, strict=True)]

    @property
    def may_transpose(self) -> bool:
        """Whether the conversion transposes each matrix where the parameter's shape asks for it."""
        return self.converter is not None and self.converter.operations[-1:] == [_TRANSPOSE_TO_FIT]

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


def _operations(converter: WeightConverter) -> list[tuple[type, int | None]]:
    """The operations as class and dimension, without a transpose at their end."""
    operations = [operation for operation in converter.operations if operation is not _TRANSPOSE_TO_FIT]
    return [(type(operation), getattr(operation, "dim", None)) for operation in operations]


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
    # As transformers does: its tables; else the name as it is, of a model saved in its own names. Then ours.
    attempts = [(renamings, converters), ([], []), (renamings, _SINGLE_EXPERTS)]
    assignments: dict[str, Assignment] = {}
    homeless = []
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
            homeless.append(name)
    return list(assignments.values()), homeless


def keeps_float32(model: PreTrainedModel, dtype: Any) -> re.Pattern[str] | None:
    """The parameters that the model class wants in float32 although the model has `dtype`; None if there are none."""
    plan = model._get_dtype_plan(dtype)
    return re.compile("|".join(name.replace("*", ".*") for name in plan)) if plan else None
