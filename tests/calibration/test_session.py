"""From text to files of statistics, to a checkpoint with static scales, in functions and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minifloat.calibration.calibrate import calibrate, calibrate_set
from minifloat.calibration.data import load_calibration_data
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration, held_out_path
from minifloat.commands.main import main
from minifloat.errors import DataError, DestinationError, UsageError
from minifloat.model.runtime.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n\n".join(f"story {number}: the cat sat on mat {number * 7}." for number in range(80)))
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_part_is_held_out_with_histograms_and_the_rest_makes_the_scales(llama_folder: Path, text: Path) -> None:
    collected = calibrate(llama_folder, [text], CalibrateOptions(samples=20, seq_len=32, held_out=0.25))
    assert collected.held_out is not None
    assert (collected.stats.sequences, collected.held_out.sequences) == (15, 5)
    assert all(module.histogram is None for module in collected.stats.inputs.values())
    assert all(module.histogram is not None for module in collected.held_out.inputs.values())
    assert collected.stats.tokens == 15 * 32


@pytest.mark.parametrize("max_memory", [None, 300_000], ids=["whole model", "layer by layer"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_the_two_runs_of_one_open_model_have_the_statistics_of_separate_runs(
    model_type: str, max_memory: int | None, make_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", model_type)
    run = CalibrateOptions(samples=20, seq_len=32, held_out=0.25, max_memory=max_memory)
    data = load_calibration_data([text], load_tokenizer(folder), run)
    kept, held_out = data.held_out(0.25)
    collected = calibrate(folder, [text], run)
    assert collected.stats == calibrate_set(folder, kept, run)
    assert collected.held_out == calibrate_set(folder, held_out, replace(run, histogram=True))


def test_what_is_saved_is_what_is_loaded(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    collected = calibrate(llama_folder, [text], CalibrateOptions(samples=10, seq_len=32))
    files = collected.save(tmp_path / "a.safetensors")
    assert files == (tmp_path / "a.safetensors", tmp_path / "a.held-out.safetensors")
    assert Calibration.load(tmp_path / "a.safetensors") == collected
    with pytest.raises(DestinationError, match="--overwrite"):
        collected.save(tmp_path / "a.safetensors")
    collected.save(tmp_path / "a.safetensors", overwrite=True)


def test_nothing_is_held_out_when_asked(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    collected = calibrate(llama_folder, [text], CalibrateOptions(samples=4, seq_len=32, held_out=0))
    assert collected.held_out is None
    assert collected.stats.sequences == 4
    collected.save(tmp_path / "a.safetensors")
    assert not held_out_path(tmp_path / "a.safetensors").exists()


def test_bad_requests_are_refused(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="held_out: expected at least 0 and less than 1"):
        calibrate(llama_folder, [text], CalibrateOptions(held_out=1.0))
    with pytest.raises(DataError):
        calibrate(llama_folder, [tmp_path / "missing.txt"])
    with pytest.raises(DataError):
        calibrate(llama_folder, [text], CalibrateOptions(seq_len=1_000_000))


def test_calibrate_prints_json_that_parses_and_nothing_else(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.safetensors"
    result = run("calibrate", llama_folder, stats, "--data", text, "--samples", "6", "--seq-len", "16", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["files"] == [str(stats), str(held_out_path(stats))]
    assert document.items() >= json.loads(run("inspect", stats, "--json").stdout).items()
    assert document["data"]["sources"][0]["name"] == str(text)


def test_the_command_line_goes_from_text_to_a_static_checkpoint(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    stats, out = tmp_path / "stats.safetensors", tmp_path / "out"
    result = run("calibrate", llama_folder, stats, "--data", text, "--samples", "20", "--seq-len", "32")
    assert result.exit_code == 0, result.output
    assert "self_attn.q_proj" in result.output
    assert "Written to" in result.output
    as_json = json.loads(run("inspect", stats, "--json").stdout)
    assert as_json["rule"] == "max"
    assert (as_json["sequences"], as_json["tokens"], as_json["held_out_tokens"]) == (18, 18 * 32, 2 * 32)
    scales = {row["module"]: row["scale"] for row in as_json["inputs"]}
    assert len(scales) == 2 * 7
    assert [row["tensor"].rsplit(".", 1)[1] for row in as_json["kv_cache"]] == ["k", "v"] * 2
    again = run("calibrate", llama_folder, stats, "--data", text)
    assert again.exit_code == 2
    assert "--overwrite" in again.output

    plot = tmp_path / "stats.html"
    result = run("inspect", stats, "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "<svg" in plot.read_text()

    result = run("quantize", llama_folder, out, "--scheme", "fp8-static", "--stats", stats, "--kv-cache", "fp8")
    assert result.exit_code == 0, result.output
    assert "static scale of" in result.output
    assert "model.layers.*.self_attn.k " in result.output
    report = json.loads((out / "minifloat.json").read_text())
    written = {entry["module"]: entry["scale"] for entry in report["activations"]}
    assert all(written[module] == scale for module, scale in scales.items())
    assert len(report["activations"]) == 2 * 7 + 2 * 2
    assert all(entry["saturated"] is not None for entry in report["activations"] if entry["tokens"])
    options = ("--data", text, "--window", "32", "--prompts", "0", "--max-kl", "10", "--min-top1", "0")
    compared = run("compare", llama_folder, out, *options, "--max-ppl-increase", "100%")
    assert compared.exit_code == 0, compared.output
    assert "E4M3 per tensor (static)" in compared.output
    assert "BF16" in run("compare", llama_folder, out, *options, "--weight-only").output


def test_quantize_calibrates_on_the_spot(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("\n\n".join("a story about number " + str(number) * 40 for number in range(5000)))
    result = run(
        "quantize", llama_folder, tmp_path / "out", "--scheme", "fp8-static", "--calibration", text, "--rule", "mse",
        "--calibration-samples", "20", "--calibration-seq-len", "64",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    recipe = json.loads((tmp_path / "out" / "minifloat.json").read_text())["recipe"]
    assert recipe["calibration"]["rule"] == "mse:octaves=4"
    assert recipe["calibration"]["sequences"] == 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stats", "{tmp}/missing.safetensors"], "missing.safetensors"),
        (["--max-saturation", "0.1"], "needs --stats or --calibration"),
        (["--stats", "a", "--calibration", "b"], "give one"),
        (["--calibration", "{text}", "--rule", "median"], "unknown calibration rule 'median'; valid: max"),
    ],
)
def test_mistakes_with_calibration_are_one_line(
    llama_folder: Path, text: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    filled = [option.format(tmp=tmp_path, text=text) for option in options]
    result = run("quantize", llama_folder, tmp_path / "out", "--scheme", "fp8-static", *filled)
    assert result.exit_code == 2
    assert message in result.output


def test_a_size_that_cannot_be_read_is_refused(llama_folder: Path, text: Path, tmp_path: Path) -> None:
    result = run("calibrate", llama_folder, tmp_path / "s.safetensors", "--data", text, "--max-memory", "lots")
    assert result.exit_code == 2
    assert "8GiB" in result.output


def test_a_limit_of_memory_gives_the_same_statistics_and_leaves_no_work_folder(
    llama_folder: Path, text: Path, tmp_path: Path
) -> None:
    whole, limited = tmp_path / "whole.safetensors", tmp_path / "limited.safetensors"
    common = ("--data", text, "--samples", "8", "--seq-len", "32")
    assert run("calibrate", llama_folder, whole, *common).exit_code == 0
    result = run("calibrate", llama_folder, limited, *common, "--max-memory", "150KiB")
    assert result.exit_code == 0, result.output
    assert Calibration.load(whole) == Calibration.load(limited)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".safetensors"] * 4
