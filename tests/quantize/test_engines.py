"""`quantize` says which engines load its output, chooses a default that loads, and says so before it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from minifloat.commands.main import main
from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, check_checkpoint
from minifloat.deploy.check.target import LOCAL
from minifloat.errors import UsageError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"

#: Engines that reports on compressed-tensors have.
SERVED = {engine: name for engine, name in ENGINES.items() if engine not in LOCAL}


@pytest.fixture
def ragged(make_checkpoint: Callable[..., Path]) -> Path:
    """A model whose widths, 64 and 160, are no multiples of 128."""
    return make_checkpoint()


def test_the_default_becomes_a_scheme_that_engines_load_and_that_is_said_before_anything_is_written(
    ragged: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "out", []

    def announce(sentence: str) -> None:
        assert not out.exists()
        assert not list(tmp_path.glob("*.partial*"))
        said.append(sentence)

    report = quantize_checkpoint(ragged, out, announce=announce)
    assert report.recipe["scheme"] == "fp8-dynamic"
    assert len(said) == 2
    assert said[1].startswith("Nothing was measured on this model.")
    assert "of this model the default fp8-block loads in no engine but minifloat" in said[0]
    assert "fp8-dynamic, which loads in vLLM, SGLang, transformers" in said[0]
    assert said[0] in report.notes


def test_a_chosen_scheme_that_only_minifloat_loads_is_written_after_a_warning(ragged: Path, tmp_path: Path) -> None:
    said: list[str] = []
    report = quantize_checkpoint(ragged, tmp_path / "out", "fp8-block", announce=said.append)
    assert report.recipe["scheme"] == "fp8-block"
    assert "No engine but minifloat loads fp8-block of this model" in said[0]
    assert "--scheme fp8-dynamic loads in vLLM, SGLang, transformers" in said[0]


def test_a_default_that_loads_is_announced_as_unmeasured_only(tmp_path: Path) -> None:
    said: list[str] = []
    report = quantize_checkpoint(STORYBOOK, tmp_path / "out", announce=said.append)
    assert report.recipe["scheme"] == "fp8-block"
    assert [sentence.partition(".")[0] for sentence in said] == ["Nothing was measured on this model"]


def test_a_target_says_what_it_decided(ragged: Path, tmp_path: Path) -> None:
    changed = quantize_checkpoint(ragged, tmp_path / "a", options=QuantizeOptions(target="vllm:h100"))
    assert changed.recipe["scheme"] == "fp8-dynamic"
    assert "the default fp8-block loads not on vllm:h100" in changed.notes[0]
    kept = quantize_checkpoint(STORYBOOK, tmp_path / "b", options=QuantizeOptions(target="vllm:l40s"))
    assert kept.recipe["scheme"] == "fp8-block"
    assert kept.notes[1].startswith("vllm:l40s: loads as fp8-block (FP8 in 128x128 blocks with ")
    with pytest.raises(UsageError, match=r"will not load: .*; --scheme fp8-dynamic loads on vllm:h100"):
        quantize_checkpoint(ragged, tmp_path / "c", "fp8-block", QuantizeOptions(target="vllm:h100"))


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8", "mxfp4"])
def test_the_verdicts_are_those_of_check(ragged: Path, tmp_path: Path, scheme: str) -> None:
    report = quantize_checkpoint(ragged, tmp_path / "out", scheme)
    assert [verdict.engine for verdict in report.engines] == list(SERVED)
    for verdict in report.engines:
        loaded = {
            name
            for name in ENGINE_HARDWARE
            if not check_checkpoint(report.destination, f"{verdict.engine}:{name}").failures
        }
        assert loaded == {*verdict.runs_on, *verdict.unknown}
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert saved["engines"] == [json.loads(json.dumps(verdict.to_dict())) for verdict in report.engines]


def test_the_command_prints_a_verdict_per_engine_with_reason_and_cure(ragged: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["quantize", str(ragged), str(tmp_path / "out"), "--scheme", "fp8-block"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.partition("Engines that load it")[2].splitlines()
    named = lines[1 : 2 * len(SERVED) : 2]
    assert [line.split(":")[0].strip() for line in named] == list(SERVED.values())
    assert lines[1] == f"  {ENGINES['vllm']}: does not load on all"
    assert "a block of 128x128 would lie in two parts of a fused layer" in lines[2]
    assert "; cure: " in lines[2]
    assert result.stderr.startswith("Note: No engine but minifloat loads fp8-block")
