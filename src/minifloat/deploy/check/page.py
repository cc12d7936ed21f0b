"""The engines that load a checkpoint as HTML: a table of engines and machines, then the reasons."""

from __future__ import annotations

from collections.abc import Mapping

from minifloat.deploy.check.deployment import Reports, cell_text
from minifloat.deploy.check.target import ENGINES
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.report.page import bullets, code, folded, section, table
from minifloat.report.text import visible


def engine_rows(reports: Reports) -> list[list[str]]:
    """Return a row per engine: its name, and whether it loads the checkpoint on each machine."""
    return [
        [ENGINES[engine], *(cell_text(report) for report in by_machine.values())]
        for engine, by_machine in reports.items()
    ]


def engines_section(reports: Reports, model: str) -> str:
    """Return the section about the engines that load the checkpoint."""
    reasons = _reasons(reports)
    return section(
        "Where it loads",
        table(("engine", *ENGINE_HARDWARE), engine_rows(reports)),
        folded("Why", bullets(reasons)) if reasons else "",
        code(f"minifloat check {model} --engine ENGINE --hardware HARDWARE"),
    )


def _reasons(reports: Reports) -> list[str]:
    """Return each finding once, with the engines and machines that it is about."""
    places: dict[str, dict[str, list[str]]] = {}
    for engine, by_machine in reports.items():
        for machine, report in by_machine.items():
            for finding in report.findings:
                text = f"{finding.problem}; {finding.cure}" if finding.cure else finding.problem
                places.setdefault(visible(text), {}).setdefault(engine, []).append(machine)
    return [f"{_places(by_engine)}: {text}" for text, by_engine in places.items()]


def _places(by_engine: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{ENGINES[engine]} on {', '.join(machines)}" for engine, machines in by_engine.items())
