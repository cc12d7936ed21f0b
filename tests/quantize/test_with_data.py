"""`quantize --data` as a user sees it: report, card, the command that repeats it, and errors with their cure."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from minifloat.calibration.data import CalibrationSet, interleave
from minifloat.calibration.layerwise.walk import LayerWork
from minifloat.commands.main import main
from minifloat.errors import StorageError
from minifloat.quantize.data import SourceGain, source_gains, source_warnings
from minifloat.quantize.provenance import quantize_options
from minifloat.quantize.report import summary_rows
from minifloat.quantize.rounding.texts import SplitText

MakeModel = Callable[..., Path]
TEXT = ("--calibration-samples", "60", "--calibration-seq-len", "32")


@pytest.fixture(scope="module")
def llama(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("data") / "llama")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("text")
    for name, letters in (("first.txt", "abcde"), ("second one.txt", "fghij")):
        words = random.Random(name)
        (folder / name).write_text(" ".join("".join(words.choices(letters, k=5)) for _ in range(400)))
    return folder / "first.txt", folder / "second one.txt"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def test_report_card_and_command_of_a_run_with_two_sources(
    llama: Path, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighted = f"{texts[1]}#weight=2"
    options = ("--scheme", "mxfp4", "--data", texts[0], "--data", weighted, "--calibration-seed", "3", "--verbose")
    result = run(llama, tmp_path / "out", *options, *TEXT)
    assert result.exit_code == 0, result.output
    for word in ("held-out KL", "seen KL", "rounded to nearest", "folded", "match for", "error nearest"):
        assert word in result.output
    report = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    rounding = report["rounding"]
    gains = rounding["held_out"]["by_source"]
    assert [gain["name"] for gain in gains] == [str(texts[0]), str(texts[1])]
    assert sum(gain["tokens"] for gain in gains) == rounding["held_out"]["tokens"]
    mean = sum(gain["tokens"] * gain["method"] for gain in gains) / rounding["held_out"]["tokens"]
    assert mean == pytest.approx(rounding["held_out"]["method"])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "## Rounding" in card
    for _, text in summary_rows(rounding):
        assert text in card
    command = next(line.strip() for line in card.splitlines() if line.strip().startswith("minifloat quantize"))
    monkeypatch.chdir(llama.parent)
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("minifloat", "quantize")
    again = run(*(str(tmp_path / "again") if argument == "OUT" else argument for argument in arguments))
    assert again.exit_code == 0, again.output
    assert digests(tmp_path / "again") == digests(tmp_path / "out")


@pytest.mark.parametrize("no_fold", [(), ("--no-fold",)])
def test_text_of_the_model_itself_is_kept_and_the_command_names_all_options(
    llama: Path, tmp_path: Path, no_fold: tuple[str, ...]
) -> None:
    result = run(llama, tmp_path / "out", "--scheme", "mxfp4", "--data", "self", "--method", "gptq", *no_fold, *TEXT)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "llama.self-text-32.safetensors").exists()
    report = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    folding = " --no-fold" if no_fold else ""
    expected = f"--scheme mxfp4 --method gptq --data self{folding} {' '.join(TEXT)}"
    assert quantize_options(report["recipe"]) == expected
    folded = [row["site"] for row in report["rounding"]["folds"] if row["folded"]]
    assert not (folded and no_fold)
    changed = [row["name"] for row in report["tensors"] if row["detail"] == "norm or bias, changed by rounding"]
    assert sorted(changed) == sorted(site for site in folded if "norm" in site)
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("were folded into the norms" in card) == bool(folded)


def test_norms_that_are_copied_in_another_dtype_are_not_folded_and_the_report_says_why(
    llama: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(llama, tmp_path / "mixed")
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    norms = {name: tensor.float() for name, tensor in tensors.items() if name.endswith("layernorm.weight")}
    save_file(tensors | norms, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    result = run(folder, tmp_path / "out", "--scheme", "mxfp4", "--data", texts[0], *TEXT)
    assert result.exit_code == 0, result.output
    why = "input_layernorm.weight is copied in float32, and the model that runs has it rounded to bfloat16"
    assert why in " ".join(result.output.split())
    folds = json.loads((tmp_path / "out" / "minifloat.json").read_text())["rounding"]["folds"]
    assert {row["site"] for row in folds if why in row.get("reason", "")} == {
        name for name in norms if name.endswith("input_layernorm.weight")
    }


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (("--method", "gptq"), ["the method gptq needs text", "--data self"]),
        (("--method", "gptq", "--dry-run"), ["the method gptq needs text", "--data self"]),
        (("--no-fold",), ["--no-fold needs --data"]),
        (("--data", "self", "--method", "gtpq"), ["gtpq", "gptq", "match", "nearest"]),
        (("--method", "gtpq"), ["gtpq", "gptq", "match", "nearest"]),
        (("--data", "nowhere.txt"), ["nowhere.txt"]),
        (("--data", "self", "--calibration-samples", "4", "--calibration-seq-len", "16"), ["too few", "at least"]),
        (
            ("--data", "self", "--calibration", "self", *TEXT, "--scheme", "fp8-static"),
            ["--calibration: with --data", "leave it out"],
        ),
        (("--data", "self", "--stats", "none.safetensors", "--calibration", "self"), ["give one of them"]),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_with_the_cure_and_status_2(
    llama: Path, tmp_path: Path, options: tuple[str, ...], messages: list[str]
) -> None:
    result = run(llama, tmp_path / "out", "--scheme", "mxfp4", *options)
    assert result.exit_code == 2, result.output
    for message in messages:
        assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_each_held_out_sequence_counts_for_its_source() -> None:
    labels = interleave([[0] * 6, [1] * 14])
    mixed = CalibrationSet(tuple((label, label) for label in labels))
    held_out = SplitText.of(mixed, 0.4).reported
    method = [float(ids[0]) for ids in held_out.sequences]
    record = {"sources": [{"name": "a", "sequences": 6}, {"name": "b", "sequences": 14}]}
    found = {"nearest_by_sequence": [0.5] * len(method), "method_by_sequence": method}
    gains = source_gains(record, held_out, 0.4, found)
    assert [(gain.name, gain.method, gain.nearest) for gain in gains] == [("a", 0.0, 0.5), ("b", 1.0, 0.5)]
    assert sum(gain.sequences for gain in gains) == len(held_out.sequences)
    assert source_gains({"sources": record["sources"][:1]}, held_out, 0.4, found) == ()


def test_only_a_source_that_surely_loses_is_named() -> None:
    gains = [
        SourceGain("better", 4, 100, 0.05, 0.02, -0.03, 0.001),
        SourceGain("unsure", 4, 100, 0.05, 0.06, 0.01, 0.02),
        SourceGain("single", 1, 25, 0.05, 0.09, 0.04, None),
        SourceGain("worse", 4, 100, 0.05, 0.09, 0.04, 0.01),
    ]
    (warning,) = source_warnings(gains, "match")
    assert "worse, match is worse than rounding to nearest (0.0900 against 0.0500 nats)" in warning


@pytest.mark.parametrize("options", [("--data", "self"), ("--scheme", "fp8-static", "--calibration", "self")], ids=str)
def test_where_memory_is_short_an_fp8_copy_writes_the_text(
    llama: Path, tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minifloat.calibration.own_text.available_memory", lambda device: 1)
    result = run(llama, tmp_path / "out", *options, *TEXT)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "minifloat.json").read_text())["recipe"]
    if report.get("rounding"):
        assert report["rounding"]["data"]["sources"][0]["weights"]["scheme"] == "fp8"
    kept = [file.name for file in tmp_path.iterdir()]
    assert not [name for name in kept if name.startswith(".own-text-")]
    assert [name for name in kept if name.endswith(".safetensors")]


def test_a_full_disk_is_one_line_and_the_same_command_continues(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--scheme", "mxfp4", "--data", "self", "--quiet", *TEXT)
    finish, calls = LayerWork.finish, []

    def fail_once(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise StorageError("layer-1.safetensors: No space left on device")
        finish(self, *arguments)

    monkeypatch.setattr(LayerWork, "finish", fail_once)
    stopped = run(llama, tmp_path / "out", *options)
    assert (stopped.exit_code, len(stopped.output.strip().splitlines())) == (2, 1), stopped.output
    assert "No space left" in stopped.output
    assert not (tmp_path / "out").exists()
    assert run(llama, tmp_path / "out", *options).exit_code == 0
    assert run(llama, tmp_path / "whole", *options).exit_code == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
