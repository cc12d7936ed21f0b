"""Names of modules in transformers, where they differ from those in a checkpoint; a config lists both.

torch and transformers are imported only for a family whose names are not declared in `architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, SingleExpert
from minifloat.model.architecture.roles import expert_group


@dataclass(frozen=True)
class EngineNames:
    """The names of modules in transformers."""

    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def engine_names(checkpoint: Checkpoint, modules: Iterable[str]) -> EngineNames:
    """Return the names in transformers of modules of a checkpoint that are linears."""
    family = family_of(checkpoint.config)
    if family.renames is None:
        return _of_transformers(checkpoint, modules)
    others: dict[str, tuple[str, ...]] = {}
    for module in modules:
        name = module
        for pattern, replacement in family.renames:
            name = re.sub(pattern, replacement, name)
        if name != module:
            others[module] = (name,)
    return EngineNames(others)


def _of_transformers(checkpoint: Checkpoint, modules: Iterable[str]) -> EngineNames:
    import torch

    from minifloat.model.runtime.names import assign, empty_model

    try:
        model = empty_model(checkpoint, torch.bfloat16)
    except ConfigError as error:
        problem = "The names of modules in transformers are not known; config.json lists those of the checkpoint"
        return EngineNames(notes=(f"{problem}: {error}",))
    others: dict[str, tuple[str, ...]] = {}
    listed = set()
    for assignment in assign(model, [f"{module}.weight" for module in modules])[0]:
        names = tuple(target.removesuffix(".weight") for target in assignment.targets)
        listed |= set(names)
        for source in assignment.sources:
            module = source.removesuffix(".weight")
            if names != (module,):
                others[module] = names
    linears = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return EngineNames(others, tuple(name for name in linears if name not in listed and expert_group(name) is None))


def stored_fused_as(checkpoint: Checkpoint, family: Family, places: Iterable[SingleExpert]) -> bool | None:
    """Return whether fused experts are transposed, ``[E, K, N]``; None: experts are stored one by one."""
    first = next(iter(places), None)
    if first is None or family.stored_fused is False:
        return None
    if family.stored_fused:
        return first.fused.transposed
    import torch

    from minifloat.model.runtime.names import ExpertStack, assign, empty_model

    try:
        model = empty_model(checkpoint, torch.bfloat16)
    except ConfigError:
        return None
    names = [f"{first.parent}{linear.format(first.expert)}.weight" for linear in first.fused.linears]
    for assignment in assign(model, names)[0]:
        if isinstance(assignment.converter, ExpertStack):
            return assignment.converter.transposed
    return None
