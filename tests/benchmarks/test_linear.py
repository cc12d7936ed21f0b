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


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import linear_bars

    return linear_bars


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import linear_report

    return linear_report


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import linear_shapes

    return linear_shapes


def test_a_reached_floor_passes_and_a_reached_aim_is_reported(bars: ModuleType) -> None:
    held_to = bars.bars("fp8", 1, "amx")
    assert bars.judge(held_to, {"x torch": 2.6, "read": 0.85, "x next": 0.95}).word == "pass"
    assert bars.judge(held_to, {"x torch": 3.0, "read": 0.92, "x next": 0.95}).word == "aim"
    assert bars.judge(held_to, {"x torch": 3.0, "read": 0.91, "x next": 0.95}).word == "pass"


def test_a_miss_names_the_worst_quantity_and_how_far_it_is_below_its_floor(bars: ModuleType) -> None:
    verdict = bars.judge(bars.bars("fp8", 1, "amx"), {"x torch": 2.34, "read": 0.84, "x next": 1.9})
    assert (verdict.word, verdict.quantity, str(verdict)) == ("short", "x torch", "short by 10% (x torch)")
    close = bars.judge(bars.bars("bf16", 512, "amx"), {"x torch": 0.9999})
    assert str(close) == "short by 0.1% (x torch)"


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "bf16"])
@pytest.mark.parametrize("m", [1, 2, 16, 2048])
@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx512_vnni", "avx2", "baseline"])
def test_a_format_slower_than_torch_or_than_its_next_larger_format_is_short(
    bars: ModuleType, name: str, m: int, isa: str
) -> None:
    held_to = bars.bars(name, m, isa)
    assert bars.judge(held_to, {"x torch": 0.99, "read": 1.0, "x next": 1.0}).word == "short"
    if name != "bf16":
        assert bars.judge(held_to, {"x torch": 9.0, "read": 1.0, "x next": 0.94}).quantity == "x next"


def test_without_amx_only_one_row_has_the_bars_of_the_format(bars: ModuleType) -> None:
    measured = {"x torch": 1.01, "read": 0.5}
    assert bars.judge(bars.bars("mxfp4", 64, "avx512"), measured).word == "pass"
    assert bars.judge(bars.bars("mxfp4", 1, "avx512"), measured).word == "short"
    assert bars.judge(bars.bars("mxfp4", 1, "avx2"), measured).word == "pass"
    assert bars.judge(bars.bars("mxfp4", None, "amx"), measured).word == "pass"


def test_dot_products_of_bfloat16_have_bars_of_their_own(bars: ModuleType) -> None:
    assert bars.judge(bars.bars("fp8", 8, "avx512_bf16"), {"x torch": 2.99}).word == "short"
    assert bars.judge(bars.bars("fp8", 8, "avx512_bf16"), {"x torch": 3.01}).word == "pass"
    assert bars.judge(bars.bars("mxfp4", 1, "avx512_bf16"), {"x torch": 4.3}).word == "short"
    assert bars.judge(bars.bars("nvfp4", 8, "avx512_bf16"), {"x torch": 1.01}).word == "pass"


def test_peers_are_not_judged(bars: ModuleType) -> None:
    assert bars.judge(bars.bars("torch FP32", 1, "amx"), {"x torch": 0.1}) is None


def test_ratios_are_taken_round_by_round(report: ModuleType) -> None:
    # The machine runs at half its speed in the last two rounds; the ratio is 2 in every round.
    samples = {
        "memory read": [1e-3, 2e-3, 2e-3],
        "torch BF16": [4e-3, 8e-3, 8e-3],
        "bf16": [4e-3, 8e-3, 8e-3],
        "fp8": [2e-3, 4e-3, 4e-3],
    }
    nbytes = {"memory read": 100, "torch BF16": 200, "bf16": 200, "fp8": 100}
    rows = {row.contender: row for row in report.rows_of(report.Case("s", (4, 8), 3, nbytes, samples), "amx")}
    assert rows["fp8"].measured == {"x torch": 2.0, "x next": 2.0, "read": 0.5}
    assert rows["memory read"].measured == {"read": 1.0}
    assert rows["fp8"].gflops == pytest.approx(2 * 3 * 4 * 8 / 4e-3 / 1e9)
    assert rows["fp8"].verdict.word == "pass"


def test_misses_are_sorted_worst_first(report: ModuleType) -> None:
    samples = {"torch BF16": [1.0] * 3, "bf16": [1.1] * 3, "fp8": [2.0] * 3, "mxfp4": [0.5] * 3}
    case = report.Case("s", (4, 8), 2, dict.fromkeys(samples, 1), samples)
    assert [row.contender for row in report.misses(report.rows_of(case, "amx"))] == ["fp8", "bf16"]


def test_shapes_have_names_and_equal_ones_are_measured_once(shapes: ModuleType) -> None:
    found = shapes.parse_shapes("llama-8b,4096x4096,qwen3-0.6b/o,7x5")
    assert found["llama-8b/qkv"] == (6144, 4096)
    assert found["qwen3-0.6b/o"] == (1024, 2048)
    assert found["7x5"] == (7, 5)
    assert list(found.values()).count((4096, 4096)) == 1


@pytest.mark.parametrize("text", ["7", "llama-9b", "llama-8b/head", "7x", ""])
def test_an_unknown_shape_is_refused(shapes: ModuleType, text: str) -> None:
    with pytest.raises(UsageError, match="unknown"):
        shapes.parse_shapes(text)


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


def test_the_table_of_every_instruction_set_marks_what_is_below_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import every_isa

    def case(m: int, **ratios: float) -> dict[str, object]:
        names = {"torch_bf16": "torch BF16", "torch_fp32": "torch FP32"}
        contenders = [{"contender": names.get(n, n), "measured": {"x torch": r}} for n, r in ratios.items()]
        return {"m": m, "contenders": [{"contender": "memory read", "measured": {}}, *contenders]}

    records = {
        "avx512": {"cases": [case(1, torch_bf16=1.0, torch_fp32=0.3, fp8=2.0), case(1, torch_bf16=1.0, fp8=0.9)]},
        "avx2": {"cases": [case(1, torch_bf16=1.0, fp8=1.5), case(4, torch_bf16=1.0, fp8=0.99)]},
    }
    _, head, *lines = every_isa.table(records)
    assert head.split() == ["M", "1", "4"]
    assert [line.split() for line in lines] == [
        ["avx512", "torch", "FP32", "0.30", "-"],
        ["avx512", "fp8", "0.90!", "-"],
        ["avx2", "fp8", "1.50", "0.99!"],
    ]
    assert every_isa.losses(records) == 2
