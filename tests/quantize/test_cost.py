"""Tokens, time, memory and disk of a run with data are said before it, and it is refused where they do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result
from rounding_cases import write_model

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.commands.main import main
from minifloat.errors import UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.layouts import compressed_tensors
from minifloat.model.plan.quantization import make_part, make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan, TensorPlan
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize import cost
from minifloat.quantize.amount import enough_text, fewest_sequences
from minifloat.quantize.cost import DataCost, data_cost
from minifloat.quantize.estimate import DEFAULT_TEXT, Rates, Tokens, rounding_work
from minifloat.quantize.rounding.methods import DEFAULT_ROUNDING
from minifloat.quantize.rounding.rates import measure_rates

GB = 10**9
LLAMA_70B = {"hidden_size": 8192, "vocab_size": 128256, "num_hidden_layers": 80}
RATES = Rates.of_product(1e12)


def llama_70b() -> QuantizationPlan:
    """A plan of the linears of Llama 3 70B, which no file holds."""
    leaves = {
        "self_attn.q_proj": (8192, 8192),
        "self_attn.k_proj": (1024, 8192),
        "self_attn.v_proj": (1024, 8192),
        "self_attn.o_proj": (8192, 8192),
        "mlp.gate_proj": (28672, 8192),
        "mlp.up_proj": (28672, 8192),
        "mlp.down_proj": (8192, 28672),
    }
    scheme, layout, tensors = SCHEMES["mxfp4"], compressed_tensors.WRITER, []
    for layer in range(80):
        for leaf, shape in leaves.items():
            module = f"model.layers.{layer}.{leaf}"
            info = TensorInfo(f"{module}.weight", "BF16", shape, "model.safetensors", 0, 2 * math.prod(shape))
            tensors.append(TensorPlan(info, Role.LINEAR, (make_part(info, module, shape, scheme, layout),)))
    for name, role in (("model.embed_tokens", Role.EMBEDDING), ("lm_head", Role.LM_HEAD)):
        info = TensorInfo(f"{name}.weight", "BF16", (128256, 8192), "model.safetensors", 0, 2 * 128256 * 8192)
        tensors.append(TensorPlan(info, role, reason=role.value))
    return QuantizationPlan(scheme, layout, (), tuple(tensors))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the memory and the disk that are free, and rates that are not measured."""

    def free(memory: int, disk: int) -> None:
        monkeypatch.setattr(cost, "available_memory", lambda *_: memory)
        monkeypatch.setattr(cost.shutil, "disk_usage", lambda *_: SimpleNamespace(free=disk))
        monkeypatch.setattr(cost, "measure_rates", lambda *_: RATES)
        monkeypatch.setattr(cost, "measure_product_rate", lambda *_: 1e12)

    return free


def cost_of_70b(folder: Path, source: str = "self") -> DataCost:
    plan = llama_70b()
    checkpoint = cast(Checkpoint, SimpleNamespace(config=LLAMA_70B, stored_bytes=lambda info: info.nbytes))
    text = enough_text(DEFAULT_TEXT, plan, LLAMA_70B)
    files = folder / "self", folder / "work"
    return data_cost(checkpoint, plan, [source], text, DEFAULT_ROUNDING, folder / "out", files)


def test_figures_of_a_70b_model_follow_from_its_shapes(tmp_path: Path, machine: Callable[[int, int], None]) -> None:
    machine(150 * GB, 1000 * GB)
    found = cost_of_70b(tmp_path)
    assert (found.tokens.kept, found.tokens.choosing, found.tokens.reported) == (114_688, 6400, 6400)
    # Hessian and its factors of down_proj, 16 bytes for each entry, are 13.2 GB; a layer is 1.7 GB.
    assert 15 * GB < found.memory < 25 * GB
    # Three streams of hidden states twice, 8 GB; the inputs of a layer's stages twice, 35 GB; codes twice, 73 GB.
    assert 90 * GB < found.disk < 150 * GB
    assert found.writing is not None
    assert 70 * GB < found.writing.copy < 75 * GB
    assert found.writing.memory == found.writing.copy
    assert found.problems() == ()
    # 2 x 68.5e9 weights, 127,488 tokens and more than two passes through the layers are 38 PFLOP.
    assert 10 * 3600 < found.seconds < 72 * 3600
    for words in ("127,488 tokens", "114,688 for statistics", "6,400 only reported", "FP8 copy", "GiB"):
        assert words in found.text()


@pytest.mark.parametrize(
    ("memory", "disk", "words"),
    [
        (40, 1000, ["own text takes", "--data FILE"]),
        (100, 60, ["FP8 copy", "--data FILE", "of disk"]),
        (12, 1000, ["own text takes", "statistics of its widest linear", "--exclude"]),
    ],
)
def test_a_machine_that_is_too_small_is_refused_with_the_cure(
    tmp_path: Path, machine: Callable[[int, int], None], memory: int, disk: int, words: list[str]
) -> None:
    machine(memory * GB, disk * GB)
    found = cost_of_70b(tmp_path)
    problems = " ".join(found.problems())
    for word in words:
        assert word in problems
    with pytest.raises(UsageError, match="--data FILE"):
        found.require()


def test_text_in_a_file_needs_no_copy_and_less_memory(tmp_path: Path, machine: Callable[[int, int], None]) -> None:
    machine(40 * GB, 1000 * GB)
    found = cost_of_70b(tmp_path, "text.txt")
    assert found.writing is None
    assert found.problems() == ()
    assert "writes" not in found.text()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


SMALL = ("--scheme", "mxfp4", "--data", "self", "--calibration-samples", "12", "--calibration-seq-len", "48")


def test_the_dry_run_and_the_run_say_one_sentence_and_stored_text_counts(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama", "llama")
    preview = run(model, tmp_path / "out", *SMALL, "--dry-run")
    sentence = (
        "576 tokens of text (480 for statistics, 48 to choose with, 48 only reported), of which the model writes 576"
    )
    assert preview.exit_code == 0, preview.output
    assert sentence in preview.output
    assert {file.name for file in tmp_path.iterdir()} == {"llama"}
    result = run(model, tmp_path / "out", *SMALL)
    assert sentence in result.output
    record = json.loads(run(model, tmp_path / "again", *SMALL, "--dry-run", "--json").output)["data"]
    assert record["writing"] is None  # the file of own text has it
    assert record["problems"] == []
    assert record["tokens"] == {"kept": 480, "choosing": 48, "reported": 48, "length": 48}
    assert record["disk"] > 0


MINUTES = ("--scheme", "mxfp4", "--data", "self", "--calibration-seq-len", "48", "--minutes")


def test_as_much_text_is_taken_as_fits_in_the_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Callable[[int, int], None]
) -> None:
    machine(100 * GB, 1000 * GB)
    monkeypatch.setattr(cost, "measure_rates", lambda *_: Rates.of_product(1e7))
    model = write_model(tmp_path / "llama", "llama")

    def taken(minutes: float) -> tuple[int, float]:
        result = run(model, tmp_path / "out", *MINUTES, minutes, "--dry-run", "--json")
        data = json.loads(result.output)["data"]
        tokens = sum(data["tokens"][part] for part in ("kept", "choosing", "reported"))
        return tokens // 48, (data["seconds"] + data["writing"]["seconds"]) / 60

    least = taken(0.001)[0]
    with Checkpoint.open(model) as checkpoint:
        plan = make_plan(checkpoint, SCHEMES["mxfp4"], compressed_tensors.WRITER)
        assert least == fewest_sequences(replace(DEFAULT_TEXT, seq_len=48), plan)
    found = {minutes: taken(minutes) for minutes in (20.0, 60.0)}
    for minutes, (sequences, estimated) in found.items():
        assert sequences > least
        assert 0.9 * minutes < estimated <= minutes
    assert found[60.0][0] > 2 * found[20.0][0]


def test_an_interrupted_run_with_minutes_goes_on_with_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "llama", "llama")
    shared = ("--scheme", "mxfp4", "--data", "self", "--calibration-seq-len", "48")
    first = run(model, tmp_path / "other", *shared, "--calibration-samples", "17")
    assert first.exit_code == 0, first.output
    (tmp_path / "out.minifloat-rounding").mkdir()
    monkeypatch.setattr(cost, "measure_rates", lambda *_: Rates.of_product(1e18))
    preview = run(model, tmp_path / "out", *shared, "--minutes", "1", "--dry-run")
    assert "816 tokens of text" in preview.output  # of 17 sequences


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "self", "--calibration-samples", "30"), "not both"),
        (("--data", str(Path(__file__).parents[2] / "README.md")), "--data self"),
        ((), "--data self"),
    ],
)
def test_minutes_are_for_own_text_without_a_number(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = run(write_model(tmp_path / "llama", "llama"), tmp_path / "out", *arguments, "--minutes", "5")
    assert result.exit_code == 2
    assert words in result.output


def test_a_run_without_room_is_refused_before_text_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "llama", "llama")
    monkeypatch.setattr(cost, "available_memory", lambda *_: 1 << 20)
    result = run(model, tmp_path / "out", *SMALL)
    assert result.exit_code == 2
    assert "of memory" in result.output
    assert {file.name for file in tmp_path.iterdir()} == {"llama"}
    assert run(model, tmp_path / "out", *SMALL, "--dry-run").exit_code == 2


def test_work_grows_with_tokens_and_the_cube_of_the_width() -> None:
    tokens = Tokens(65536, 3584, 3584, 256)
    shapes = {"model.layers.0.mlp.down_proj": (64, 4096)}
    work = rounding_work(shapes, {}, tokens)
    wide = rounding_work({"model.layers.0.mlp.down_proj": (64, 8192)}, {}, tokens)
    assert 6 * work.factor < wide.factor < 8 * work.factor
    assert wide.feedback == 4 * work.feedback
    assert rounding_work(shapes, {}, replace(tokens, kept=2 * 65536)).gram == 2 * work.gram


def test_an_expert_works_on_the_tokens_that_visit_it() -> None:
    tokens = Tokens(65536, 0, 0, 256)
    shapes = {f"model.layers.0.mlp.experts.{n}.down_proj": (64, 1024) for n in range(8)}
    config: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2}
    dense, mixture = rounding_work(shapes, {}, tokens), rounding_work(shapes, config, tokens)
    assert mixture.gram == dense.gram / 4
    assert mixture.factor == dense.factor


def test_rates_are_those_of_a_processor() -> None:
    rates = measure_rates(SCHEMES["mxfp4"], torch.bfloat16)
    for rate in (rates.forward, rates.gram, rates.factor, rates.single, rates.solve, rates.feedback, rates.read):
        assert 1e7 < rate < 1e15
    assert 1e3 < rates.cast < 1e12


def test_a_budget_and_the_default_scheme_say_what_they_measure_and_round_again(tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama", "llama")
    text = SMALL[2:]

    def said(*options: str) -> tuple[str, dict[str, Any]]:
        shown = run(model, tmp_path / "out", *options, *text, "--dry-run")
        assert shown.exit_code == 0, shown.output
        again = run(model, tmp_path / "out", *options, *text, "--dry-run", "--json")
        return " ".join(shown.output.split()), json.loads(again.output)["data"]

    once, alone = said("--scheme", "mxfp4")
    assert "Before it" not in once
    assert alone["searching"] is None
    for options, what, times in (
        ((), "what rounding inputs costs is measured", 2),
        (("--max-kl", "0.1"), "groups of weights is measured", 3),
        (("--target-bits", "6"), "groups of weights is measured", 0),
    ):
        words, found = said(*options)
        assert what in words
        assert (f"up to {times} more times" in words) == (times > 0)
        assert found["searching"]["seconds"] > 0
        assert found["disk"] >= alone["disk"]
