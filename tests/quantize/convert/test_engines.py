"""`convert` says what engines make of its output: before it writes, in the report, in the card and in the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from converting import dequantize, quantization_config

from minifloat._version import __version__
from minifloat.commands.main import main
from minifloat.deploy.check import ENGINE_HARDWARE, LoadVerdict, check_checkpoint
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.report.markdown import read_metadata

INTEROP = Path(__file__).parents[2] / "data" / "interop"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    quantize_checkpoint(INTEROP / "base-llama", tmp_path / "source", "fp8-dynamic")
    return tmp_path / "source"


def test_a_wrong_answer_of_transformers_is_announced_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "out", []

    def announce(sentence: str) -> None:
        assert not out.exists()
        said.append(sentence)

    report = convert_checkpoint(source, out, "modelopt", announce=announce)
    assert len(said) == 1
    assert said[0].startswith("transformers loads the output and answers wrongly: transformers does not know ModelOpt")
    assert said[0] in report.notes
    assert said[0] in (out / "README.md").read_text()
    convert_checkpoint(out, tmp_path / "back", "compressed-tensors", announce=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("llmc-fp8-dynamic", "modelopt"),
        ("modelopt-nvfp4", "compressed-tensors"),
        ("modelopt-fp8-kv", "compressed-tensors"),
        ("deepseek-block128", "compressed-tensors"),
        ("llmc-fp8-dynamic", None),
    ],
)
def test_the_verdicts_on_the_plan_are_those_of_check_on_the_output(
    tmp_path: Path, model: str, target: str | None
) -> None:
    report = convert_checkpoint(
        INTEROP / model, tmp_path / "out", target, ConvertOptions(dequantize=target is None, allow_rounding=True)
    )
    for verdict in report.engines:
        for name in ENGINE_HARDWARE:
            checked = check_checkpoint(tmp_path / "out", f"{verdict.engine}:{name}").verdict
            places = {
                LoadVerdict.LOADS: verdict.loads,
                LoadVerdict.DEGRADED: verdict.degraded,
                LoadVerdict.UNKNOWN: verdict.unknown,
                LoadVerdict.WRONG: verdict.wrong,
                LoadVerdict.REFUSED: verdict.refused,
            }
            assert name in places[checked], (verdict.engine, name, checked)


def test_the_card_has_the_new_layout_its_engines_and_the_library_that_loads_it(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", "modelopt")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "rule amax, layout modelopt." in card
    assert "layout compressed-tensors." not in card
    assert card.count("minifloat deployment: begin") == 1
    assert "AutoModelForCausalLM" not in card
    metadata = read_metadata(card)
    assert metadata["library_name"] == "minifloat"
    assert metadata["tags"] == ["fp8", "fp8-dynamic", "minifloat", "modelopt", "vllm"]
    dequantize(source, tmp_path / "plain")
    plain = (tmp_path / "plain" / "README.md").read_text()
    assert read_metadata(plain)["library_name"] == "transformers"
    assert "rule amax, dequantized since, see below." in plain


def test_the_config_names_minifloat_as_its_producer(source: Path, tmp_path: Path) -> None:
    convert_checkpoint(source, tmp_path / "out", "modelopt")
    config = quantization_config(tmp_path / "out")
    assert config["producer"] == {"name": "minifloat", "version": __version__}
    file = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert file["producer"]["name"] == "modelopt"  # vLLM 0.32 raises ValueError for every other name
    assert f"written by minifloat {__version__}" in file["producer"]["comment"]


def test_the_command_prints_the_verdict_of_each_engine(source: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "out"), "--layout", "modelopt"])
    assert result.exit_code == 0, result.output
    assert "answers wrongly on all" in result.stdout
    assert result.stderr.startswith("Note: transformers loads the output and answers wrongly")
