"""The answers of `check` on every engine and machine, for the other commands, the model card and the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from minifloat.deploy.check.judge import CheckReport, judge
from minifloat.deploy.check.rules import Finding, LoadVerdict
from minifloat.deploy.check.subject import Case, Subject, Weight
from minifloat.deploy.check.target import ENGINES, Target
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.report.text import layer_pattern

_LAYER = re.compile(r".*?\.\d+(?=\.)")

Reports = Mapping[str, Mapping[str, CheckReport]]


def check_everywhere(subject: Subject, model: str) -> dict[str, dict[str, CheckReport]]:
    """Return the report of every engine on one device of every machine: engine -> machine -> report."""
    subject = _distinct_layers(subject)
    return {
        engine: {
            name: judge(model, None, Case(subject, Target(engine, hardware)))
            for name, hardware in ENGINE_HARDWARE.items()
        }
        for engine in ENGINES
    }


def _distinct_layers(subject: Subject) -> Subject:
    """Return the model without layers that equal an earlier one, so that the rules have fewer weights to look at."""
    layers: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        match = _LAYER.match(weight.module)
        layers.setdefault(match[0] if match else weight.module, []).append(weight)
    first: dict[Hashable, list[Weight]] = {}
    for name, weights in layers.items():
        inner = tuple(
            (weight.module.removeprefix(name), weight.shape, weight.spec, weight.activation) for weight in weights
        )
        first.setdefault((layer_pattern(name), inner), weights)
    return replace(subject, weights=tuple(weight for weights in first.values() for weight in weights))


def loads_in(reports: Mapping[str, CheckReport]) -> list[str]:
    """Return the machines on which an engine loads the checkpoint, including those where it is degraded."""
    return [name for name, report in reports.items() if report.verdict in (LoadVerdict.LOADS, LoadVerdict.DEGRADED)]


def engine_tags(reports: Reports) -> list[str]:
    """Return the servers that load the model on some machine, as tags of its card."""
    return [engine for engine in ("vllm", "sglang") if loads_in(reports[engine])]


def library_name(reports: Reports) -> str:
    """Return the library that hubs show a snippet for: transformers only if it loads the model."""
    return "transformers" if loads_in(reports["transformers"]) else "minifloat"


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
