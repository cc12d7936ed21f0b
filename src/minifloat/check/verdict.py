"""How a rule judges, and what it is asked about."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from minifloat._version import __version__
from minifloat.check.hardware import HARDWARE, Hardware
from minifloat.check.subject import Kind, Subject, Weight
from minifloat.errors import UsageError, lookup

#: Engine -> the version whose code the rules were read from.
ENGINES = {
    "vllm": "vLLM 0.32.0",
    "sglang": "SGLang, main branch at 0104cc50",
    "transformers": "transformers 5.23.0 with compressed-tensors 0.20.0",
    "minifloat": f"minifloat {__version__}",
}

_TARGET = re.compile(r"(?P<engine>[a-z]+):(?P<hardware>[a-z0-9-]+)(:tp(?P<tp>[1-9]\d*))?")


class Verdict(enum.Enum):
    """What becomes of a checkpoint; the value is how reports name it. Later ones are worse."""

    LOADS = "loads"
    DEGRADED = "loads, with less than it promises"
    UNKNOWN = "not known"
    WRONG = "loads, and answers wrongly"
    REFUSED = "will not load"

    @property
    def rank(self) -> int:
        """Its place in the order of badness."""
        return list(Verdict).index(self)

    @property
    def is_failure(self) -> bool:
        """Whether nobody should start a server for it."""
        return self in (Verdict.WRONG, Verdict.REFUSED)


@dataclass(frozen=True)
class Target:
    """Where a checkpoint is to run.

    Attributes:
        engine: A name in `ENGINES`.
        hardware: What it runs on.
        tp: GPUs that share every matrix (tensor parallelism).
    """

    engine: str
    hardware: Hardware
    tp: int = 1

    @classmethod
    def of(cls, engine: str, hardware: str, tp: int = 1) -> Target:
        """The target of these names.

        Raises:
            UnknownNameError: No such engine or hardware.
            UsageError: `tp` is below 1.
        """
        lookup("engine", engine, ENGINES)
        if tp < 1:
            raise UsageError(f"tp is at least 1, got {tp}")
        return cls(engine, lookup("hardware", hardware, HARDWARE), tp)

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read ``ENGINE:HARDWARE`` or ``ENGINE:HARDWARE:tpN``.

        Raises:
            UsageError: It is neither, or names something unknown.
        """
        match = _TARGET.fullmatch(text)
        if match is None:
            raise UsageError(f"a target is ENGINE:HARDWARE or ENGINE:HARDWARE:tpN, as in vllm:h100:tp4; got {text!r}")
        return cls.of(match["engine"], match["hardware"], int(match["tp"] or 1))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.engine}:{self.hardware.name}" + (f":tp{self.tp}" if self.tp > 1 else "")


@dataclass(frozen=True)
class Case:
    """A checkpoint and where it is to run: what rules look at."""

    subject: Subject
    target: Target

    @property
    def tp(self) -> int:
        """GPUs that share every matrix."""
        return self.target.tp

    def weights(self, *kinds: Kind, experts: bool | None = None) -> tuple[Weight, ...]:
        """Quantized weights of these kinds, or all of them; experts alone, linears alone, or both."""
        return tuple(
            weight
            for weight in self.subject.quantized
            if (not kinds or weight.kind in kinds) and experts in (None, weight.is_expert)
        )


#: What a rule finds at fault, as lines; empty where it does not apply.
Find = Callable[[Case], Iterable[str]]


@dataclass(frozen=True)
class Rule:
    """Something that an engine does to some checkpoints.

    Attributes:
        name: Unique.
        engines: Names in `ENGINES`.
        hardware: Names in `HARDWARE`.
        source: Where it was read: file and function of the engine's version in `ENGINES`, or a thread.
        verdict: What happens.
        find: Tells whether it applies, and to what.
        problem: What goes wrong, for the user.
        cure: What to do instead.
        seen: How it was confirmed by really loading such a checkpoint; empty where it was only read.
    """

    name: str
    engines: tuple[str, ...]
    hardware: tuple[str, ...]
    source: str
    verdict: Verdict
    find: Find
    problem: str
    cure: str = ""
    seen: str = ""


@dataclass(frozen=True)
class Finding:
    """A rule that applies.

    Attributes:
        rule: Its name.
        verdict: What happens.
        problem: What goes wrong.
        cure: What to do instead; empty where nothing need be done.
        source: Where that is known from.
        evidence: What it was found at: modules and sizes.
    """

    rule: str
    verdict: Verdict
    problem: str
    cure: str
    source: str
    evidence: tuple[str, ...]


def apply_rules(rules: Iterable[Rule], case: Case) -> Iterator[Finding]:
    """The rules that apply to a case, in their order."""
    for rule in rules:
        if case.target.engine not in rule.engines or case.target.hardware.name not in rule.hardware:
            continue
        evidence = tuple(dict.fromkeys(rule.find(case)))
        if evidence:
            seen = f"; seen with {rule.seen}" if rule.seen else ""
            source = f"{rule.source}{seen}"
            yield Finding(rule.name, rule.verdict, rule.problem, rule.cure, source, evidence)
