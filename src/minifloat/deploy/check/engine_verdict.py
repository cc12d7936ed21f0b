"""`EngineVerdict`: the answers of `check` for one engine on all machines, for reports of other commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minifloat.deploy.check.deployment import check_everywhere
from minifloat.deploy.check.judge import CheckReport
from minifloat.deploy.check.rules import Finding, LoadVerdict
from minifloat.deploy.check.subject import Subject
from minifloat.deploy.check.target import ENGINES

#: The engine of this package, which every scheme is made for.
OWN = "minifloat"


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine loads a checkpoint, on which machines, and why not on the others."""

    engine: str
    loads: tuple[str, ...]
    degraded: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: tuple[str, ...]
    refused: tuple[str, ...]
    problem: str
    cure: str

    @property
    def runs_on(self) -> tuple[str, ...]:
        """Machines on which it loads, including those where it is degraded."""
        return (*self.loads, *self.degraded)

    def __str__(self) -> str:
        """Return one sentence: where it loads, and where not."""
        places = (
            ("loads on", self.loads),
            ("with less than it promises on", self.degraded),
            ("not known on", self.unknown),
            ("answers wrongly on", self.wrong),
            ("does not load on", self.refused),
        )
        total = sum(len(names) for _, names in places)
        clauses = [f"{verb} {'all' if len(names) == total else ', '.join(names)}" for verb, names in places if names]
        return f"{ENGINES[self.engine]}: {'; '.join(clauses)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return values | {"version": ENGINES[self.engine]}


def engine_verdicts(reports: Mapping[str, Mapping[str, CheckReport]]) -> tuple[EngineVerdict, ...]:
    """Return a verdict for each engine."""
    return tuple(_verdict(engine, by_machine) for engine, by_machine in reports.items())


def verdicts_of(subject: Subject) -> tuple[EngineVerdict, ...]:
    """Return the verdict of each engine on a checkpoint or a plan."""
    return engine_verdicts(check_everywhere(subject, ""))


def others_that_load(verdicts: tuple[EngineVerdict, ...]) -> tuple[str, ...]:
    """Return the engines other than minifloat that load the checkpoint on some machine."""
    return tuple(verdict.engine for verdict in verdicts if verdict.engine != OWN and verdict.runs_on)


def short_name(engine: str) -> str:
    """Return the name of an engine as it writes itself, without its version: ``"vLLM"``."""
    return ENGINES[engine].split()[0].rstrip(",")


def _verdict(engine: str, reports: Mapping[str, CheckReport]) -> EngineVerdict:
    def on(wanted: LoadVerdict) -> tuple[str, ...]:
        return tuple(name for name, report in reports.items() if report.verdict is wanted)

    worst = max((report.verdict for report in reports.values()), key=lambda verdict: verdict.rank)
    first = [report.findings[0] for report in reports.values() if report.verdict is worst and report.findings]
    shown: Finding | None = None
    if first and worst is not LoadVerdict.LOADS:
        rule = Counter(finding.rule for finding in first).most_common(1)[0][0]
        shown = next(finding for finding in first if finding.rule == rule)
    return EngineVerdict(
        engine=engine,
        loads=on(LoadVerdict.LOADS),
        degraded=on(LoadVerdict.DEGRADED),
        unknown=on(LoadVerdict.UNKNOWN),
        wrong=on(LoadVerdict.WRONG),
        refused=on(LoadVerdict.REFUSED),
        problem="" if shown is None else shown.problem,
        cure="" if shown is None else shown.cure,
    )
