"""The sentence on `--data self` after a run without data: when it is printed, and what it estimates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from minifloat.commands.main import main
from minifloat.kernels.speed import measure_product_rate
from minifloat.quantize import report
from minifloat.quantize.estimate import FEWEST_SEQUENCES
from minifloat.quantize.report import duration_text, estimate_seconds

HINT = "With --data self"


def output(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main, ["quantize", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("--scheme", "mxfp4"), True),
        (("--scheme", "nvfp4"), True),
        (("--scheme", "fp8"), False),
        (("--scheme", "mxfp4", "--quiet"), False),
        (("--scheme", "mxfp4", "--json"), False),
    ],
    ids=str,
)
def test_four_bits_without_data_end_with_one_line_on_data(
    llama_folder: Path, tmp_path: Path, options: tuple[str, ...], printed: bool
) -> None:
    lines = output(llama_folder, tmp_path / "out", *options).splitlines()
    assert [line.startswith(HINT) for line in lines[-1:]] == ([printed] if lines else [])
    assert sum(HINT in line for line in lines) == printed
    assert HINT not in (tmp_path / "out" / "minifloat.json").read_text()


def test_the_hint_imports_no_torch(llama_folder: Path, tmp_path: Path) -> None:
    code = "import sys; from minifloat.commands.main import main; main(sys.argv[1:], standalone_mode=False); "
    code += "assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "quantize", str(llama_folder), str(tmp_path / "out"), "--scheme", "mxfp4"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert HINT in result.stdout


def test_the_rate_of_products_is_that_of_a_processor() -> None:
    assert 1e8 < measure_product_rate() < 1e15


def test_the_estimate_grows_with_the_weights_and_falls_with_the_rate() -> None:
    def layers(count: int) -> list[tuple[str, tuple[int, int]]]:
        leaves = {"self_attn.q_proj": (2048, 2048), "mlp.gate_proj": (5632, 2048), "mlp.down_proj": (2048, 5632)}
        return [(f"model.layers.{n}.{leaf}.weight", shape) for n in range(count) for leaf, shape in leaves.items()]

    assert estimate_seconds(layers(2), 1e11) == pytest.approx(2 * estimate_seconds(layers(1), 1e11))
    assert estimate_seconds(layers(1), 1e11) > estimate_seconds(layers(1), 1e12)


def test_the_estimate_is_of_the_sequences_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [("model.layers.0.mlp.up_proj.weight", (5632, 2048))]
    before = estimate_seconds(weights, 1e11)
    monkeypatch.setattr(report, "FEWEST_SEQUENCES", 2 * FEWEST_SEQUENCES)
    assert estimate_seconds(weights, 1e11) > 1.5 * before


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "a minute"), (100, "2 minutes"), (3000, "50 minutes"), (7200, "2.0 hours"), (100_000, "28 hours")],
)
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
