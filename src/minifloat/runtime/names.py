"""Maps the names in a checkpoint to the parameters of a transformers model.

transformers >= 5 renames and converts tensors while it loads: Mixtral's ``block_sparse_moe`` becomes ``mlp``, the
experts of a layer are stacked into one parameter, fused projections are cut. The conversions are recorded only in its
tables (`conversion_mapping.py`), so those are used and not repeated. Only this module calls the functions for that,
which have no promise of stability; it calls them as transformers 5.10 to 5.23 do.
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

#: Conversions for models whose plain checkpoints have fused experts, so that transformers has no conversion from single
#: experts (Llama 4). Quantized checkpoints of such models have single experts, because servers read those.
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
    """The tensors of a checkpoint that together become one parameter (or several, if a conversion cuts a tensor).

    Attributes:
        target: Name of the parameter or buffer; of the first if there are several.
        converter: transformers' conversion; None if the tensor is taken as it is.
        sources: Names of the tensors, experts in the order of their index.
        patterns: For each source the source pattern of the converter that it matched; without a converter, its name.
    """

    target: str
    converter: WeightConverter | None = None
    sources: list[str] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of all parameters that the tensors become; `target` is the first."""
        if self.converter is None:
            return (self.target,)
        first, *others = self.converter.target_patterns
        return (self.target, *(self.target.replace(first, other, 1) for other in others))

    def expert_parts(self) -> list[list[str]] | None:
        """Return for each expert the sources whose rows follow each other; None if the conversion is another."""
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
        """Whether the conversion transposes each matrix if the parameter's shape requires that."""
        return self.converter is not None and self.converter.operations[-1:] == [_TRANSPOSE_TO_FIT]

    def convert(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the parameters by name, converted from the tensors that `read` returns for the names in `sources`.

        Raises:
            Exception: If the tensors do not fit transformers' conversion, which raises errors of many kinds.
        """
        if self.converter is None:
            return {self.target: read(self.sources[0])}
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.target, source, pattern, _reader(read, source))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _reader(read: Callable[[str], Tensor], source: str) -> Any:
    """Return a function that reads a tensor when the conversion needs it."""
    return lambda: read(source)


def _operations(converter: WeightConverter) -> list[tuple[type, int | None]]:
    """Return the operations as class and dimension, without a transpose at their end."""
    operations = [operation for operation in converter.operations if operation is not _TRANSPOSE_TO_FIT]
    return [(type(operation), getattr(operation, "dim", None)) for operation in operations]


def assign(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Assignment], list[str]]:
    """Return the parameter that each tensor of a checkpoint becomes.

    Args:
        model: The model; its parameters may be on the meta device.
        names: The tensors, by the names of a plain checkpoint (``<module>.weight`` for a quantized weight).

    Returns:
        The assignments, and the names for which the model has no place.
    """
    expected = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    # First transformers' tables, then the name as it is (of a model saved by its own names), then `_SINGLE_EXPERTS`.
    attempts = [(renamings, converters), ([], []), (renamings, _SINGLE_EXPERTS)]
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
            surplus.append(name)
    return list(assignments.values()), surplus


def keeps_float32(model: PreTrainedModel, dtype: Any) -> re.Pattern[str] | None:
    """Return the pattern of the parameters that stay float32 although the model has `dtype`; None if there are none."""
    plan = model._get_dtype_plan(dtype)
    return re.compile("|".join(name.replace("*", ".*") for name in plan)) if plan else None
