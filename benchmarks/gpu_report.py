"""Write `gpu.jsonl` as a page of tables, after every section, so that a run that is cut off has a page too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_run import DRY_RUN

Line = dict[str, Any]


def write_report(out: Path, command: str) -> Path:
    """Write ``gpu.md`` from ``gpu.jsonl``."""
    lines = [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]
    parts = ["# GPU", ""]
    if any("dry_run" in line for line in lines):
        parts += [f"**{DRY_RUN[0].upper()}{DRY_RUN[1:]}: sizes are tiny, the device is a CPU.**", ""]
    parts += [f"    {command}", ""]
    for title, section, columns in TABLES:
        rows = [line for line in lines if line["section"] in section and "failed" not in line]
        if rows:
            parts += [f"## {title}", "", *_table(rows, columns), ""]
    failed = [line for line in lines if "failed" in line]
    if failed:
        parts += [
            "## Not measured",
            "",
            *(f"- {line['section']}, {line.get('what', '')}: {line['failed']}" for line in failed),
            "",
        ]
    path = out / "gpu.md"
    path.write_text("\n".join(parts))
    return path


_MODEL = ("what", "runner", "batch", "tokens_per_second", "ms_per_step", "step_gb", "bound_share", "ratio")
_PRODUCT = ("shape", "n", "k", "m", "contender", "us", "spread", "gbps", "read_share", "tflops", "peak_share", "ratio")
TABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("The machine", ("environment", "device"), ()),
    ("Its limits", ("ceiling",), ("what", "gb", "gbps", "tflops", "spread")),
    ("Against float64, into memory that held NaN", ("check",), ("what", "worst_relative_l2", "bar", "passed")),
    ("Tests that need a GPU", ("tests",), ("passed", "summary")),
    ("Products (ratio: to torch BF16 in this run)", ("products",), _PRODUCT),
    ("Beside others", ("peers",), _PRODUCT),
    ("A model, end to end", ("model",), _MODEL),
    ("Quantizing on the device", ("quantizer",), ("what", "us", "gbps", "read_share")),
    ("Quantizing a checkpoint", ("streaming",), ("what", "seconds", "source_gbps")),
)  # fmt: skip


def _table(lines: Sequence[Line], columns: Sequence[str]) -> list[str]:
    if not columns:
        return [
            f"- {key}: {_shown(value)}"
            for line in lines
            for key, value in line.items()
            if key not in ("section", "dry_run")
        ]
    rows = ["| " + " | ".join(_shown(line.get(column)) for column in columns) + " |" for line in lines]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *rows]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
