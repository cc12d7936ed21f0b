"""Prints the diagnosis of an installation."""

from __future__ import annotations

from minifloat.commands.display.console import make_console, make_table
from minifloat.runtime.diagnosis import Diagnosis


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print versions, cores, kernels and advice."""
    console = make_console()
    table = make_table("what", "found")
    for name, version in diagnosis.versions.items():
        table.add_row(name, version)
    table.add_row("cores", str(diagnosis.cores))
    quota = diagnosis.cpu_quota
    table.add_row("CPU time limit", "none" if quota is None else f"{quota:.3g} cores (control group)")
    table.add_row("threads at most", str(diagnosis.threads))
    table.add_row("OpenMP", ", ".join(diagnosis.openmp) or "none seen")
    table.add_row("native kernels", diagnosis.instruction_set or "none")
    console.print(table)
    for line in diagnosis.advice:
        console.print(f"\n{line}")
