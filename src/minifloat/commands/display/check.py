"""How the answer of `check` looks on a terminal. No computation here."""

from __future__ import annotations

from minifloat.check import ENGINES, CheckReport, Finding
from minifloat.commands.display.console import make_console, make_table

_SHOWN = 6  #: lines of evidence; all are in the JSON


def print_check(report: CheckReport) -> None:
    """The verdict, the kernels, then every rule that applies with its reason, its cure and its source."""
    console = make_console()
    target = report.target
    made = f" as {report.scheme}" if report.scheme else ""
    gpus = f" x{target.tp}" if target.tp > 1 else ""
    console.print(f"{report.model}{made}, {report.layout or 'not quantized'}", soft_wrap=True)
    machine = f"{target.hardware.name}{gpus} ({target.hardware.generation.name})"
    console.print(f"{ENGINES[target.engine]} on {machine}: {report.verdict.value}", style="bold")
    if report.kernels:
        table = make_table("weights", "kernel of linears", "computes with")
        for kind, kernel in report.kernels:
            table.add_row(kind.value, kernel.name, kernel.computes)
        console.print()
        console.print(table)
    for finding in report.findings:
        console.print()
        for line in _lines(finding):
            console.print(line, soft_wrap=True, markup=False)


def _lines(finding: Finding) -> list[str]:
    more = len(finding.evidence) - _SHOWN
    return [
        f"{finding.verdict.value}: {finding.problem}",
        *(f"  at     {line}" for line in finding.evidence[:_SHOWN]),
        *([f"         and {more} more"] if more > 0 else []),
        *([f"  cure   {finding.cure}"] if finding.cure else []),
        f"  rule   {finding.rule} ({finding.source})",
    ]
