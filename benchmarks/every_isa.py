"""Run `benchmarks/linear.py` on every instruction set that this machine can force, and print one table of the ratios.

torch reads its limits when it is imported, so each instruction set gets a process of its own. Imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from linear_bars import BASELINE, FORMATS, NEVER_BELOW_BASELINE

from minifloat.errors import KernelUnavailable, MinifloatError
from minifloat.kernels import native

QUANTITY = "x torch"


def run(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Run the benchmark once per instruction set, print the table, and return the record of each.

    Args:
        arguments: Options of `benchmarks/linear.py`, without ``--every-isa``, ``--isa``, ``--json`` and ``--check``.

    Raises:
        KernelUnavailable: If there is no native library.
        MinifloatError: If a run fails.
    """
    library = native.load()
    if library is None:
        raise KernelUnavailable(native.why_unavailable())
    records: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for isa in library.isas:
            out = Path(folder) / f"{isa}.json"
            click.echo(f"\n=== {isa} ===")
            script = str(Path(__file__).with_name("linear.py"))
            done = subprocess.run([sys.executable, script, *arguments, "--isa", isa, "--json", str(out)], check=False)
            if done.returncode != 0:
                raise MinifloatError(f"{isa}: benchmarks/linear.py ended with status {done.returncode}")
            records[isa] = json.loads(out.read_text())
    click.echo("\n" + "\n".join(table(records)))
    return records


def losses(records: dict[str, dict[str, Any]]) -> int:
    """Return the number of our cells (instruction set, format, M) below torch BF16 on the worst shape."""
    return sum(
        value < NEVER_BELOW_BASELINE
        for record in records.values()
        for (name, _), value in _worst(record).items()
        if name in FORMATS
    )


def table(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table: x torch BF16 on the worst shape, per instruction set, contender and M.

    Args:
        records: Instruction set -> what ``--json`` writes.
    """
    ms = sorted({case["m"] for record in records.values() for case in record.get("cases", [])})
    lines = [
        f"{QUANTITY[2:]} means {BASELINE} limited to the same instruction set; the worst shape; "
        f"! marks what is below {NEVER_BELOW_BASELINE:g}",
        f"{'M':<28}" + "".join(f"{m:>8}" for m in ms),
    ]
    for isa, record in records.items():
        worst = _worst(record)
        for name in dict.fromkeys(name for name, _ in worst):
            cells = [_cell(name, worst.get((name, m))) for m in ms]
            lines.append(f"{isa:<13}{name:<15}" + "".join(cells))
    return lines


def _worst(record: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Return the smallest ratio over all shapes by (contender, M); the baseline itself is left out."""
    worst: dict[tuple[str, int], float] = {}
    for case in record.get("cases", []):
        for contender in case["contenders"]:
            ratio = contender["measured"].get(QUANTITY)
            if ratio is None or contender["contender"] == BASELINE:
                continue
            key = contender["contender"], case["m"]
            worst[key] = min(ratio, worst.get(key, ratio))
    return worst


def _cell(name: str, ratio: float | None) -> str:
    if ratio is None:
        return f"{'-':>7} "
    return f"{ratio:7.2f}{'!' if name in FORMATS and ratio < NEVER_BELOW_BASELINE else ' '}"
