"""The modules of a model to observe, with the names of their weights in the checkpoint.

Statistics use the names of the checkpoint, as quantizing, servers and reports do; transformers may hold the same
weights under other names or stacked (`runtime.names`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from minifloat.calibration.experts import is_transposed
from minifloat.checkpoint import Checkpoint
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.roles import role_of
from minifloat.model.layouts import Description, describe
from minifloat.model.runtime.build import empty_model
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.names import Assignment, assign

_LOG = logging.getLogger(__name__)

#: Parameters of transformers' experts classes: those that multiply the input of the module, and those that come after.
_INNER = ("gate_up_proj", "up_proj")
_OUTER = ("down_proj",)


@dataclass(frozen=True)
class LinearSite:
    """A linear layer."""

    path: str
    names: tuple[str, ...]
    width: int


@dataclass
class ExpertsSite:
    """An experts module whose weights are stacked."""

    path: str
    inner: tuple[tuple[str, ...], ...] = ()
    outer: tuple[tuple[str, ...], ...] = ()
    inner_width: int = 0
    outer_width: int = 0


@dataclass(frozen=True)
class Sites:
    """All modules to observe, in the order of names in the checkpoint."""

    linears: tuple[LinearSite, ...]
    experts: tuple[ExpertsSite, ...]

    def attention_name(self, path: str) -> str:
        """Return the name of an attention module in the checkpoint, derived from a linear inside it, or its path."""
        for site in self.linears:
            if site.path.startswith(f"{path}."):
                return site.names[0].rsplit(".", site.path.count(".") - path.count("."))[0]
        return path


def find_sites(model: PreTrainedModel, checkpoint: Checkpoint, description: Description | None = None) -> Sites:
    """Return the modules to observe, and log a warning that names weights whose inputs cannot be observed."""
    description = description or describe(checkpoint)
    family = family_of(checkpoint.config)
    quantizable = (Role.LINEAR, Role.EXPERTS)
    observed = {info.name for info in checkpoint.tensors.values() if role_of(info, family) in quantizable}
    if description.weights:
        observed -= {tensor for weight in description.weights.values() for tensor in weight.tensors}
        observed |= {
            f"{weight.module}.weight" if weight.expert is None else weight.module.rpartition(".")[0]
            for weight in description.weights.values()
        }
    # transformers' tables map to the parameter names of the unquantized model, which a quantized model does not have.
    unquantized = empty_model(checkpoint, model.dtype) if description.weights else model
    assignments, _ = assign(unquantized, observed)
    linears: list[LinearSite] = []
    experts: dict[str, ExpertsSite] = {}
    missed: list[str] = []
    for assignment in assignments:
        path, _, leaf = assignment.target.rpartition(".")
        owner = model.get_submodule(path)
        if isinstance(owner, nn.Linear | QuantizedLinear) and leaf == "weight":
            names = tuple(source.removesuffix(".weight") for source in assignment.sources)
            linears.append(LinearSite(path, names, int(owner.in_features)))
        elif not _add_experts(experts.setdefault(path, ExpertsSite(path)), owner, leaf, assignment, family):
            missed += assignment.sources
    if missed:
        _LOG.warning("%d weights are in modules whose inputs cannot be observed: %s", len(missed), _listing(missed))
    return Sites(tuple(linears), tuple(site for site in experts.values() if site.inner and site.outer))


def _add_experts(site: ExpertsSite, owner: Any, leaf: str, assignment: Assignment, family: Family) -> bool:
    """Add the names of one stacked parameter to a site; return False if `calibration.experts` cannot run the module."""
    if leaf not in (*_INNER, *_OUTER):
        return False
    transposed = is_transposed(owner, leaf)
    if transposed is None:
        return False
    experts, *sides = getattr(owner, leaf).shape
    names = _expert_names(assignment, experts, family)
    if names is None:
        return False
    width = sides[0 if transposed else 1]
    if leaf in _INNER:
        site.inner, site.inner_width = names, width
    else:
        site.outer, site.outer_width = names, width
    return True


def _expert_names(assignment: Assignment, experts: int, family: Family) -> tuple[tuple[str, ...], ...] | None:
    """Return for each expert the names of the linears that a stacked parameter is made of; None if they are unknown."""
    fused = family.fused_tensor(assignment.sources[0])
    if fused is not None and len(assignment.sources) == 1:
        parent = fused.parent(assignment.sources[0])
        return tuple(tuple(f"{parent}{linear.format(index)}" for linear in fused.linears) for index in range(experts))
    parts = assignment.expert_parts()
    if parts is None:
        return None
    return tuple(tuple(source.removesuffix(".weight") for source in part) for part in parts)


def _listing(names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
