"""The groups of weights that share a format, and the bytes that each format takes.

A group is what servers run as one: q, k and v; gate and up; the experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import expert_group
from minifloat.model.layouts import WriteLayout
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.tensor_plan import QuantizationPlan, TensorPlan, module_name
from minifloat.numerics.scheme import Scheme

#: Roles of the weights that `Budget.bits` counts.
_COUNTED = (Role.LINEAR, Role.EXPERTS)
#: Name of the group of all experts, where engines need one format for them.
_ALL_EXPERTS = "experts of all layers"


@dataclass(frozen=True)
class Option:
    """A format that a group may have."""

    scheme: Scheme | None  # the format; None: the weights are kept as they are
    nbytes: int


@dataclass(frozen=True)
class Group:
    """Weights that share a format."""

    name: str
    modules: tuple[str, ...]
    parts: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Groups:
    """The groups of a model, and what lies outside of them."""

    groups: tuple[Group, ...]
    names: tuple[str, ...]
    fixed_bytes: int
    counted_weights: int
    counted_bytes: int

    def bits(self, group_bytes: int) -> float:
        """Return the bits per counted weight if the groups take `group_bytes`."""
        return 8 * (group_bytes + self.counted_bytes) / max(self.counted_weights, 1)


def find_groups(
    plan: QuantizationPlan, schemes: Sequence[Scheme], user: Sequence[Override], *, experts_together: bool = False
) -> Groups:
    """Return the groups of a plan."""
    members: dict[str, list[TensorPlan]] = {}
    counted_weights = counted_bytes = 0
    for tensor in plan.tensors:
        if tensor.role not in _COUNTED:
            continue
        counted_weights += _weights(tensor)
        module = module_name(tensor.source)
        if tensor.parts and not any(re.search(override.pattern, module) for override in user):
            experts = expert_group(tensor.parts[0].module)
            group = experts or tensor.parts[0].group
            together = experts_together and experts is not None
            members.setdefault(_ALL_EXPERTS if together else group, []).append(tensor)
        else:
            counted_bytes += _output_bytes(tensor)
    groups = tuple(_group(name, tensors, schemes, plan.layout) for name, tensors in members.items())
    in_groups = sum(_output_bytes(tensor) for tensors in members.values() for tensor in tensors)
    names = tuple(module_name(tensor.source) for tensor in plan.tensors)
    return Groups(groups, names, plan.output_bytes - in_groups, counted_weights, counted_bytes)


def _group(name: str, tensors: Sequence[TensorPlan], schemes: Sequence[Scheme], layout: WriteLayout) -> Group:
    parts = [part for tensor in tensors for part in tensor.parts]
    options = [Option(None, sum(tensor.source.nbytes for tensor in tensors))]
    for scheme in schemes:
        if all(scheme.weight.divides(part.shape) for part in parts):
            outputs = [layout.weight_tensors(part.module, scheme.weight, part.shape).all for part in parts]
            options.append(Option(scheme, sum(tensor.nbytes for of_part in outputs for tensor in of_part)))
    options.sort(key=lambda option: option.nbytes)
    return Group(
        name,
        tuple(module_name(tensor.source) for tensor in tensors),
        tuple(part.module for part in parts),
        sum(map(_weights, tensors)),
        tuple(options),
    )


def _weights(tensor: TensorPlan) -> int:
    count = 1
    for size in tensor.source.shape:
        count *= size
    return count


def _output_bytes(tensor: TensorPlan) -> int:
    """Return the bytes of the weight in the output, without scales from calibration."""
    if not tensor.parts:
        return tensor.source.nbytes
    return sum(output.nbytes for part in tensor.parts for output in part.tensors.all)
