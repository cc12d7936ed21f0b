"""The formats of a mixture: those that engines load together, as the rules of `minifloat.deploy.check` say.

Each format is tried in a plan that mixes it with the formats accepted before it, for linears and for experts apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check.judge import check_everywhere, judge, loads_in
from minifloat.deploy.check.subject import Case, Subject
from minifloat.deploy.check.target import ENGINES, Target
from minifloat.errors import TensorError, UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import expert_group
from minifloat.model.layouts import WriteLayout
from minifloat.model.plan.overrides import KEEP, Override, override_patterns
from minifloat.model.plan.tensor_plan import QuantizationPlan, TensorPlan, module_name
from minifloat.numerics.scheme import SCHEMES, Scheme

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


def is_experts(group: Group) -> bool:
    return expert_group(group.parts[0]) is not None


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


#: Makes the plan of a scheme with overrides.
Planner: TypeAlias = Callable[[Scheme, Sequence[Override]], QuantizationPlan]

#: Engines that must load a mixture without a target, as far as they load the cheapest format.
_ENGINES = ("minifloat", "transformers", "vllm")
#: Groups of each format in a trial.
_GROUPS_PER_TRIAL = 2
#: A shape large enough for scales per tensor or row not to count.
_LARGE = (1 << 16, 1 << 16)


@dataclass(frozen=True)
class Formats:
    """What a mixture may consist of; `user` are the overrides that hold in every mixture."""

    planner: Planner
    user: Sequence[Override]
    scheme: Scheme
    groups: Groups
    engines: tuple[str, ...]
    refused: tuple[str, ...]

    def plan(self, chosen: Sequence[Scheme | None]) -> QuantizationPlan:
        """Return the plan that gives each group its format; the scheme is that of most weights."""
        weights: dict[Scheme, int] = {}
        for group, scheme in zip(self.groups.groups, chosen, strict=True):
            if scheme is not None:
                weights[scheme] = weights.get(scheme, 0) + group.weights
        default = max(weights, key=lambda scheme: weights[scheme], default=self.scheme)
        return self.planner(default, [*self.user, *mixture(self.groups, chosen, default)])


def find_formats(
    checkpoint: Checkpoint, planner: Planner, scheme: Scheme | None, user: Sequence[Override], target: str | None
) -> Formats:
    """Return the formats that may be mixed."""
    if scheme is not None and scheme.activation is not None:
        names = ", ".join(candidate.name for candidate in _weight_only())
        raise UsageError(f"a budget mixes formats of weights alone ({names}), and {scheme.name} quantizes inputs too")
    loading = _Loading(checkpoint, target)
    base, plan = _cheapest(planner, scheme, user, loading)
    richer = [candidate for candidate in _weight_only() if candidate.weight.bits_per_weight(_LARGE) > _bits(base)]
    groups = find_groups(plan, [base, *richer], user)
    trial = _Trial(planner, base, user, loading.of(plan), groups)
    allowed = {False: trial.mixed(experts=False, schemes=richer), True: trial.mixed(experts=True, schemes=richer)}
    if len(allowed[True]) == 1 and any(is_experts(group) for group in groups.groups):
        together = trial.uniform_experts(richer)
        if len(together) > 1:
            allowed[True] = together
            groups = find_groups(plan, [base, *richer], user, experts_together=True)
    limited = tuple(_limited(group, allowed[is_experts(group)]) for group in groups.groups)
    roles = {is_experts(group) for group in groups.groups}
    refused = [s for s in (*richer, None) if not any(s in allowed[experts] for experts in roles)]
    return Formats(
        planner,
        user,
        base,
        replace(groups, groups=limited),
        loading.names(plan),
        tuple(KEEP if scheme is None else scheme.name for scheme in refused),
    )


def mixture(groups: Groups, chosen: Sequence[Scheme | None], default: Scheme) -> tuple[Override, ...]:
    """Return the overrides that give each group its format, for a plan whose scheme is `default`."""
    by_format: dict[Scheme | None, list[str]] = {}
    for group, scheme in zip(groups.groups, chosen, strict=True):
        if scheme != default:
            by_format.setdefault(scheme, []).extend(group.modules)
    return tuple(
        Override(pattern, scheme)
        for scheme, modules in by_format.items()
        for pattern in override_patterns(modules, groups.names)
    )


def _bits(scheme: Scheme) -> float:
    return scheme.weight.bits_per_weight(_LARGE)


def _weight_only() -> list[Scheme]:
    """Return the schemes of weights alone, the cheapest first."""
    return sorted((scheme for scheme in SCHEMES.values() if scheme.activation is None), key=_bits)


def _limited(group: Group, allowed: Sequence[Scheme | None]) -> Group:
    return replace(group, options=tuple(option for option in group.options if option.scheme in allowed))


class _Loading:
    """Says which engines load a plan."""

    def __init__(self, checkpoint: Checkpoint, target: str | None) -> None:
        self._checkpoint = checkpoint
        self._target = None if target is None else Target.parse(target)

    def engines(self, plan: QuantizationPlan) -> set[str]:
        """Return the names of the engines, or of the target, that load the plan."""
        subject, model = Subject.of_plan(self._checkpoint, plan), str(self._checkpoint.path)
        if self._target is not None:
            failures = judge(model, plan.scheme.name, Case(subject, self._target)).failures
            return set() if failures else {str(self._target)}
        reports = check_everywhere(subject, model)
        return {engine for engine in _ENGINES if loads_in(reports[engine])}

    def names(self, plan: QuantizationPlan) -> tuple[str, ...]:
        return tuple(ENGINES.get(engine, engine) for engine in sorted(self.engines(plan)))

    def of(self, plan: QuantizationPlan) -> Callable[[QuantizationPlan], bool]:
        """Return whether another plan loads wherever this one does."""
        needed = self.engines(plan)
        return lambda other: needed <= self.engines(other)

    def refusal(self, plan: QuantizationPlan) -> str:
        """Return why the target does not load a plan; empty if it does."""
        if self._target is None:
            return ""
        try:
            judge("", plan.scheme.name, Case(Subject.of_plan(self._checkpoint, plan), self._target)).require_loadable()
        except UsageError as error:
            return str(error)
        return ""


def loads_alike(
    checkpoint: Checkpoint, target: str | None, plan: QuantizationPlan
) -> Callable[[QuantizationPlan], bool]:
    """Return whether another plan loads wherever a plan does."""
    return _Loading(checkpoint, target).of(plan)


def _cheapest(
    planner: Planner, scheme: Scheme | None, user: Sequence[Override], loading: _Loading
) -> tuple[Scheme, QuantizationPlan]:
    if scheme is not None:
        plan = planner(scheme, user)
        refusal = loading.refusal(plan)
        if refusal:
            raise UsageError(refusal)
        return scheme, plan
    reasons = []
    for candidate in _weight_only():
        try:
            plan = planner(candidate, user)
        except TensorError as error:
            reasons.append(str(error))
            continue
        if loading.engines(plan):
            return candidate, plan
        reasons.append(loading.refusal(plan))
    raise UsageError(f"no weight-only scheme suits this model: {reasons[0]}")


@dataclass(frozen=True)
class _Trial:
    """Tries formats in plans."""

    planner: Planner
    base: Scheme
    user: Sequence[Override]
    loads: Callable[[QuantizationPlan], bool]
    groups: Groups

    def mixed(self, *, experts: bool, schemes: Sequence[Scheme]) -> list[Scheme | None]:
        """Return the formats that groups of linears, or of experts, may have, beside each other and alone."""
        accepted: list[Scheme | None] = [self.base]
        for scheme in (*schemes, None):
            orders = ([*accepted, scheme] * _GROUPS_PER_TRIAL, [scheme] * len(self.groups.groups))
            if all(self._loads(self._in_turn(order, experts)) for order in orders):
                accepted.append(scheme)
        return accepted

    def _in_turn(self, formats: Sequence[Scheme | None], experts: bool) -> list[Scheme | None]:
        """Return the formats of all groups if these are given in turn to groups of linears, or of experts."""
        turn = iter(formats)
        return [
            self._possible(group, next(turn, self.base)) if is_experts(group) is experts else self.base
            for group in self.groups.groups
        ]

    def uniform_experts(self, schemes: Sequence[Scheme]) -> list[Scheme | None]:
        """Return the formats that the experts of all layers may have together."""
        accepted: list[Scheme | None] = [self.base]
        for scheme in (*schemes, None):
            possible = all(self._possible(group, scheme) == scheme for group in self.groups.groups if is_experts(group))
            chosen = [scheme if is_experts(group) else self.base for group in self.groups.groups]
            if possible and self._loads(chosen):
                accepted.append(scheme)
        return accepted

    def _possible(self, group: Group, scheme: Scheme | None) -> Scheme | None:
        return scheme if any(option.scheme == scheme for option in group.options) else self.base

    def _loads(self, chosen: Sequence[Scheme | None]) -> bool:
        try:
            plan = self.planner(self.base, [*self.user, *mixture(self.groups, chosen, self.base)])
        except UsageError:  # nothing would be quantized
            return any(scheme is None for scheme in chosen)
        return self.loads(plan)
