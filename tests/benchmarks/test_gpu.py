"""`benchmarks/gpu.py`: a dry run of all sections, recorded failures, and the error without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_a_dry_run_runs_every_section_and_is_marked_as_no_measurement(tmp_path: Path) -> None:
    sections = "environment,ceilings,checks,products,quantizers,model,more-rows,peers"
    result = run("--out", str(tmp_path), "--dry-run", "--minutes", "20", "--only", sections)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert all(line["dry_run"] == "dry run, not a measurement" for line in lines)
    logged_sections = {line["section"] for line in lines}
    assert logged_sections == {
        *("environment", "device", "ceiling", "check", "products", "quantizer", "streaming", "model", "peers"),
    }
    failed = [line for line in lines if "failed" in line]
    assert all(line["section"] == "peers" for line in failed), failed
    assert all("gemlite" in line["what"] or "Marlin" in line["what"] for line in failed), failed
    checks = [line for line in lines if line["section"] == "check"]
    assert len(checks) == 6 + 3 + 8  # quantizers of weights and of inputs, products
    assert all(line["passed"] for line in checks)
    products = {(line["shape"], line["m"], line["contender"]) for line in lines if line["section"] == "products"}
    assert len(products) == 2 * 3 * 9  # shapes, numbers of rows, the baseline and ours
    assert {line["what"] for line in lines if line["section"] == "model"} == {"bf16", "fp8", "mxfp4"}
    report = (tmp_path / "gpu.md").read_text()
    assert "**Dry run, not a measurement" in report
    assert report.count("\n| ") >= len(products)


def test_a_failure_is_recorded_and_the_run_continues(
    gpu_run: ModuleType, gpu_report: ModuleType, tmp_path: Path
) -> None:
    dry_run = gpu_run.Run(tmp_path, 1.0, True)
    with dry_run.attempt("products", "a kernel"):
        raise RuntimeError("misaligned address\nand a long trace")
    dry_run.log("products", shape="s", contender="fp8", us=1.0)
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[0]["failed"] == "RuntimeError: misaligned address"
    assert lines[1]["contender"] == "fp8"
    report = gpu_report.write_report(tmp_path, "python benchmarks/gpu.py").read_text()
    assert "- products, a kernel: RuntimeError: misaligned address" in report
    assert "| s |" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_command_ends_with_a_one_line_error(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path / "out"))
    assert result.returncode == 2
    assert result.stderr == "error: no CUDA device; --dry-run goes through everything on the CPU\n"
    assert not (tmp_path / "out").exists()
