"""`--from-quantized` with `--calibration`, `--data` and `calibrate`: the source runs with its dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from converting import dequantize, stored
from random_words import write_words
from rounding_cases import scale_channels

from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.result import Calibration, read_stats
from minifloat.calibration.rules import parse_rule
from minifloat.commands.main import main
from minifloat.errors import AlreadyQuantizedError, StatsError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

SIZE = ("--calibration-samples", "60", "--calibration-seq-len", "32")


@pytest.fixture(scope="module")
def models(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized Llama and its weights dequantized in BF16."""
    folder = tmp_path_factory.mktemp("models")
    llama = make_llama(folder / "llama")
    scale_channels(llama, [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)])
    quantize_checkpoint(llama, folder / "quantized", "mxfp8")
    dequantize(folder / "quantized", folder / "plain", "bfloat16")
    return folder / "quantized", folder / "plain"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("text"), 1, "abcdefgh", 600)


def run(*arguments: str | Path, command: str = "quantize", size: tuple[str, ...] = SIZE) -> str:
    result = CliRunner().invoke(main, [command, *map(str, arguments), *size], catch_exceptions=False)
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
    options = ("--scheme", "mxfp4", "--data", text)
    run(models[0], tmp_path / "out", *options, "--from-quantized")
    run(models[1], tmp_path / "plain", *options)
    assert stored(tmp_path / "out") == stored(tmp_path / "plain")
    report = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert report["quantized_source"]["formats"] == {"mxfp8": 14}
    assert any(row["folded"] for row in report["rounding"]["folds"])
    assert report["rounding"]["held_out"]["method"] < report["rounding"]["held_out"]["nearest"]
    command = report["provenance"]["command"]
    assert "--from-quantized" in command
    assert "--data" in command


def test_calibrate_runs_the_dequantized_model_if_asked_for(
    models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    stats, size = [tmp_path / f"{name}.safetensors" for name in ("quantized", "plain")], ("--samples", "60")
    for model, file, options in zip(models, stats, (["--from-quantized"], []), strict=True):
        run(model, file, "--data", text, "--seq-len", "32", *options, command="calibrate", size=size)
    inputs = [read_stats(file).inputs for file in stats]
    assert {name: list(found.amax) for name, found in inputs[0].items()} == {
        name: list(found.amax) for name, found in inputs[1].items()
    }
    options = ("--scheme", "fp8-static", "--from-quantized")
    run(models[0], tmp_path / "out", *options, "--stats", stats[0], size=())
    with pytest.raises(StatsError, match="another model"):
        quantize_checkpoint(
            models[0],
            tmp_path / "other",
            "fp8-static",
            QuantizeOptions(from_quantized=True),
            calibration=Calibration(read_stats(stats[1]), parse_rule("max")),
        )


def test_calibrate_refuses_a_quantized_model_unasked(models: tuple[Path, Path], text: Path, tmp_path: Path) -> None:
    with pytest.raises(AlreadyQuantizedError, match=r"convert --dequantize.* or with --from-quantized$"):
        calibrate(models[0], text)
