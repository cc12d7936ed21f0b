"""`LoadingRule`: a row of the tables in `check.rules`, and how such rows are applied to a checkpoint and a target."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from minifloat.deploy.check import vllm_plugin
from minifloat.deploy.check.subject import Kind, Subject, Weight
from minifloat.deploy.check.target import Target


class LoadVerdict(enum.Enum):
    """Outcome of loading a checkpoint with an engine, from good to bad; the value is the text in reports."""

    LOADS = "loads"
    DEGRADED = "loads, with less than it promises"
    UNKNOWN = "not known"
    WRONG = "loads, and answers wrongly"
    REFUSED = "will not load"

    @property
    def rank(self) -> int:
        """Position in the order from good to bad, from 0."""
        return list(LoadVerdict).index(self)

    @property
    def is_failure(self) -> bool:
        """Whether the engine cannot serve the checkpoint: it refuses it or answers wrongly."""
        return self in (LoadVerdict.WRONG, LoadVerdict.REFUSED)


@dataclass(frozen=True)
class Case:
    """A checkpoint and the target it is to run on: the input of every rule."""

    subject: Subject
    target: Target

    @property
    def tp(self) -> int:
        """GPUs that share every matrix."""
        return self.target.tp

    def weights(self, *kinds: Kind, experts: bool | None = None) -> tuple[Weight, ...]:
        """Return the quantized weights of these kinds."""
        return tuple(
            weight
            for weight in self.subject.quantized
            if (not kinds or weight.kind in kinds) and experts in (None, weight.is_expert)
        )


#: Returns the evidence that a rule applies, as lines; no lines where the rule does not apply.
Condition = Callable[[Case], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class LoadingRule:
    """The behaviour of an engine on checkpoints that meet a condition."""

    name: str
    hardware: tuple[str, ...]
    verdict: LoadVerdict
    condition: Condition
    problem: str
    cure: str = ""
    source: str
    confirmed_with: str = ""
    lifted_by: str = ""


@dataclass(frozen=True)
class Finding:
    """A rule that applies to a case."""

    rule: str
    verdict: LoadVerdict
    problem: str
    cure: str
    source: str
    evidence: tuple[str, ...]


def apply_rules(rules: Iterable[LoadingRule], case: Case) -> Iterator[Finding]:
    """Yield a finding for each rule that applies to a case, in the order of the rules."""
    for rule in rules:
        if case.target.hardware.name not in rule.hardware:
            continue
        is_lifted = rule.lifted_by and rule.lifted_by == case.target.plugin
        evidence = tuple(dict.fromkeys(rule.condition(_without_plugins_linears(case) if is_lifted else case)))
        if evidence:
            confirmation = f"; seen with {rule.confirmed_with}" if rule.confirmed_with else ""
            source = f"{rule.source}{confirmation}"
            yield Finding(rule.name, rule.verdict, rule.problem, rule.cure, source, evidence)


def _without_plugins_linears(case: Case) -> Case:
    """Return the case without the linears that the plugin for vLLM computes."""
    kept = tuple(
        weight
        for weight in case.subject.weights
        if weight.is_expert or vllm_plugin.kernel_of(weight.kind, case.subject.layout) is None
    )
    return replace(case, subject=replace(case.subject, weights=kept))
