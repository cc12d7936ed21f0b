"""Prints the report of `check`. No computation here."""

from __future__ import annotations

from minifloat.commands.display.console import make_console, make_table
from minifloat.deploy.check import ENGINES, CheckReport, Finding

_SHOWN_LINES = 6  #: lines of evidence per finding; the JSON has all of them


def print_check(report: CheckReport) -> None:
    """Print the verdict, the kernels, then every finding with its evidence, its cure and its rule."""
    console = make_console()
    target = report.target
    scheme = f" as {report.scheme}" if report.scheme else ""
    gpus = f" x{target.tp}" if target.tp > 1 else ""
    console.print(f"{report.model}{scheme}, {report.layout or 'not quantized'}", soft_wrap=True)
    plugin = f" with the plugin {target.plugin}" if target.plugin else ""
    machine = f"{target.hardware.name}{gpus} ({target.hardware.generation.name})"
    console.print(f"{ENGINES[target.engine]}{plugin} on {machine}: {report.verdict.value}", style="bold")
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
    more = len(finding.evidence) - _SHOWN_LINES
    return [
        f"{finding.verdict.value}: {finding.problem}",
        *(f"  at     {line}" for line in finding.evidence[:_SHOWN_LINES]),
        *([f"         and {more} more"] if more > 0 else []),
        *([f"  cure   {finding.cure}"] if finding.cure else []),
        f"  rule   {finding.rule} ({finding.source})",
    ]
