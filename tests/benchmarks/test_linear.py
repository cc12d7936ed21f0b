"""`benchmarks/linear.py`: verdicts, statistics, and one run from end to end at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from minifloat.errors import UsageError
from minifloat.kernels import native

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
needs_library = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())


def test_ratios_are_taken_round_by_round(linear_report: ModuleType) -> None:
    # The machine runs at half its speed in the last two rounds; the ratio is 2 in every round.
    samples = {
        "memory read": [1e-3, 2e-3, 2e-3],
        "torch BF16": [4e-3, 8e-3, 8e-3],
        "fp8": [2e-3, 4e-3, 4e-3],
    }
    nbytes = {"memory read": 100, "torch BF16": 200, "fp8": 100}
    rows = {row.contender: row for row in linear_report.rows_of(linear_report.Case("s", (4, 8), 3, nbytes, samples))}
    assert (rows["fp8"].faster, rows["fp8"].read) == (2.0, 0.5)
    assert (rows["memory read"].faster, rows["memory read"].read, rows["memory read"].gflops) == (None, 1.0, 0)
    assert rows["fp8"].gflops == pytest.approx(2 * 3 * 4 * 8 / 4e-3 / 1e9)


def test_what_is_slower_than_torch_is_marked(linear_report: ModuleType) -> None:
    samples = {"torch BF16": [1.0] * 3, "fp8": [2.0] * 3}
    rows = linear_report.rows_of(linear_report.Case("s", (4, 8), 2, dict.fromkeys(samples, 1), samples))
    assert ["0.50!" in linear_report.line(2, row, 1.0) for row in rows] == [False, True]


def test_shapes_have_names_and_equal_ones_are_measured_once(linear_shapes: ModuleType) -> None:
    found = linear_shapes.parse_shapes("llama-8b,4096x4096,qwen3-0.6b/o,7x5")
    assert found["llama-8b/qkv"] == (6144, 4096)
    assert found["qwen3-0.6b/o"] == (1024, 2048)
    assert found["7x5"] == (7, 5)
    assert list(found.values()).count((4096, 4096)) == 1


@pytest.mark.parametrize("text", ["7", "llama-9b", "llama-8b/head", "7x", ""])
def test_an_unknown_shape_is_refused(linear_shapes: ModuleType, text: str) -> None:
    with pytest.raises(UsageError, match="unknown"):
        linear_shapes.parse_shapes(text)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "linear.py"), "--threads", "1", "--gigabytes", "0.0001", *arguments]
    return subprocess.run(
        [*command, "--rounds", "3", "--seconds", "0.001", "--peers", "torch FP32"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_library
def test_a_run_prints_every_case_and_writes_all_samples(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    result = run("--shapes", "33x70", "--m", "1,5", "--formats", "fp8,bf16", "--json", str(out))
    assert result.returncode == 0, result.stderr
    written = json.loads(out.read_text())
    assert [case["m"] for case in written["cases"]] == [1, 5]
    names = {"memory read", "torch BF16", "torch FP32", "fp8", "bf16"}
    for case in written["cases"]:
        found = {contender["contender"] for contender in case["contenders"]}
        assert names <= found <= names | {"fp8, int8 inputs"}  # the last where the processor has kernels for it
        assert all(len(contender["samples"]) == 3 for contender in case["contenders"])
    assert {"processor", "instruction_set", "threads", "torch", "date"} <= written["machine"].keys()
    assert {"read_bandwidth", "torch_bf16"} == written["drift"].keys()
    assert result.stdout.count("torch FP32") >= 2


@needs_library
@pytest.mark.full
def test_forcing_an_instruction_set_also_limits_torch() -> None:
    result = run("--overhead", "--formats", "bf16", "--isa", "baseline")
    assert result.returncode == 0, result.stderr
    assert "ATEN_CPU_CAPABILITY=default" in result.stdout


@needs_library
@pytest.mark.full
def test_an_unknown_format_is_an_error_in_one_line() -> None:
    result = run("--formats", "fp7")
    assert result.returncode == 1
    assert result.stderr.startswith("error: unknown formats fp7; there are: fp8, ")
