"""`--from-quantized` with `--calibration` and `--data`: the source runs with its dequantized weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from converting import stored

from minifloat.commands.main import main
from minifloat.convert import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint

SIZE = ("--calibration-samples", "60", "--calibration-seq-len", "32")


@pytest.fixture(scope="module")
def models(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized Llama and its weights dequantized in BF16."""
    folder = tmp_path_factory.mktemp("models")
    quantize_checkpoint(make_llama(folder / "llama"), folder / "quantized", "mxfp8")
    convert_checkpoint(folder / "quantized", folder / "plain", dequantize=True, dtype="bfloat16")
    return folder / "quantized", folder / "plain"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    words = random.Random(1)
    file.write_text(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(600)))
    return file


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main, ["quantize", *map(str, arguments), *SIZE], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_static_scales_are_those_of_the_dequantized_model(
    models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    options = ("--scheme", "fp8-static", "--calibration", text, "--kv-cache", "fp8")
    run(models[0], tmp_path / "out", *options, "--from-quantized")
    run(models[1], tmp_path / "plain", *options)
    scales = [
        {name: value for name, value in stored(folder).items() if name.endswith(("input_scale", "k_scale", "v_scale"))}
        for folder in (tmp_path / "out", tmp_path / "plain")
    ]
    assert scales[0] == scales[1]
    assert len(scales[0]) == 2 * 7 + 2 * 2


def test_codes_are_chosen_with_text_that_runs_through_the_dequantized_model(
    models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    options = ("--scheme", "mxfp4", "--data", text, "--no-fold")
    run(models[0], tmp_path / "out", *options, "--from-quantized")
    run(models[1], tmp_path / "plain", *options)
    assert stored(tmp_path / "out") == stored(tmp_path / "plain")
    report = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert report["quantized_source"]["formats"] == {"mxfp8": 14}
    assert report["rounding"]["held_out"]["method"] < report["rounding"]["held_out"]["nearest"]
    command = report["provenance"]["command"]
    assert "--from-quantized" in command
    assert "--data" in command
