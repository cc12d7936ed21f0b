"""Formats are mixed within a budget: the bits hold, the recipe repeats the output, and impossible budgets are named."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_cases import count_passes

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.options import TextOptions
from minifloat.deploy.check import check_checkpoint
from minifloat.errors import UsageError
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import Budget, QuantizeOptions
from minifloat.quantize.report import QuantizeReport
from minifloat.quantize.rounding.budget import _Search

MakeModel = Callable[..., Path]
TEXT = TextOptions(samples=24, seq_len=32, held_out=0.25)


@pytest.fixture(scope="module")
def llama(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose formats differ enough for a choice: 4 groups in each of 2 layers."""
    return make_llama(tmp_path_factory.mktemp("budget") / "llama")


def data(text: Path) -> DataOptions:
    return DataOptions([text], TEXT)


def within(
    model: Path, out: Path, text: Path, budget: Budget, scheme: str | None = None, **options: Any
) -> QuantizeReport:
    return quantize_checkpoint(model, out, scheme, QuantizeOptions(budget=budget, **options), data=data(text))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def test_the_output_has_the_bits_of_the_budget_and_says_what_it_chose(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "out", text, Budget(bits=6.0))
    assert 5.0 < inspect_checkpoint(tmp_path / "out").quantized_bits_per_weight <= 6.0
    assert report.rounding is not None
    found = report.rounding["budget"]
    assert 5.0 < found["bits_per_weight"] <= 6.0
    assert len(found["measured"]) == 1  # the damage of nearest codes chooses, before anything is rounded
    for group in found["groups"]:
        damage = group["damage"]
        assert damage["mxfp4"] > damage["nvfp4"] > damage["fp8"] > 0
    assert len({group["format"] for group in found["groups"]}) > 1
    assert found["engines"][0].startswith("minifloat")
    assert "budget.svg" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "budget.svg").read_text().startswith("<svg")
    assert not list(tmp_path.glob("*.minifloat-rounding*"))
    assert check_checkpoint(tmp_path / "out", "vllm:h100").failures == ()


def test_the_recorded_overrides_give_the_same_bytes_without_a_budget(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "first", text, Budget(bits=6.0))
    recipe = json.loads((tmp_path / "first" / "minifloat.json").read_text())["recipe"]
    words = shlex.split(report.provenance["command"])
    assert [words[i + 1] for i, word in enumerate(words) if word == "--override"] == recipe["overrides"]
    assert words[words.index("--calibration-samples") + 1] == "24"
    quantize_checkpoint(
        llama, tmp_path / "again", recipe["scheme"], QuantizeOptions(overrides=recipe["overrides"]), data=data(text)
    )
    assert digests(tmp_path / "again") == digests(tmp_path / "first")


def test_bytes_of_all_tensors_stay_within_the_budget(llama: Path, text: Path, tmp_path: Path) -> None:
    least = quantize_checkpoint(llama, tmp_path / "mxfp4", "mxfp4").output_bytes
    report = within(llama, tmp_path / "out", text, Budget(nbytes=least + 5000))
    assert least < report.output_bytes <= least + 5000


def test_a_bound_on_the_divergence_is_met_by_a_second_run(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "half", text, Budget(bits=4.25))
    assert report.rounding is not None
    whole = report.rounding["held_out"]["method"]
    report = within(llama, tmp_path / "out", text, Budget(max_kl=whole / 3))
    assert report.rounding is not None
    assert report.rounding["held_out"]["method"] <= whole / 3
    assert report.rounding["budget"]["reached"]


def test_a_bound_that_the_cheapest_format_meets_takes_one_run(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "out", text, Budget(max_kl=50.0))
    assert report.rounding is not None
    assert len(report.rounding["budget"]["measured"]) == 1
    assert report.recipe["scheme"] == "mxfp4"
    assert report.recipe["overrides"] == []


def test_overrides_of_the_user_keep_their_format_and_count(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "out", text, Budget(bits=6.0), overrides=["down_proj=fp8"])
    down = [tensor for tensor in report.tensors if "down_proj" in tensor.name]
    assert {tensor.detail for tensor in down} == {"fp8"}
    assert inspect_checkpoint(tmp_path / "out").quantized_bits_per_weight <= 6.0


@pytest.mark.parametrize(
    ("budget", "nearest"),
    [
        (Budget(bits=4.0), "nearest that can is 4.25 bits per weight"),
        (Budget(nbytes=1000), "nearest that can is .* bytes"),
        (Budget(bits=16.0), "leaves every weight as it is; the largest"),
        (Budget(max_kl=1e-12), "cannot be met unless every weight stays as it is"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_met_names_the_nearest(
    llama: Path, text: Path, tmp_path: Path, budget: Budget, nearest: str
) -> None:
    with pytest.raises(UsageError, match=nearest):
        within(llama, tmp_path / "out", text, budget)
    assert not (tmp_path / "out").exists()


def test_a_model_whose_gradients_say_nothing_is_refused(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerStack, "loss_gradient", lambda _, __, hidden, ___: torch.zeros_like(hidden))
    with pytest.raises(UsageError, match=r"no group of weights has a damage.*--override"):
        within(llama, tmp_path / "out", text, Budget(bits=6.0))


def test_a_budget_needs_data_and_formats_of_weights_alone(llama: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --data"):
        quantize_checkpoint(llama, tmp_path / "out", options=QuantizeOptions(budget=Budget(bits=5.0)))
    with pytest.raises(UsageError, match="fp8-block quantizes inputs too"):
        within(llama, tmp_path / "out", text, Budget(bits=9.0), scheme="fp8-block")


@pytest.mark.parametrize(
    "bounds", [{}, {"bits": 5.0, "max_kl": 0.1}, {"bits": -1.0}, {"max_kl": float("nan")}], ids=str
)
def test_a_budget_is_one_positive_number(bounds: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Budget(**bounds)


def test_a_target_limits_the_formats(llama: Path, text: Path, tmp_path: Path) -> None:
    report = within(llama, tmp_path / "out", text, Budget(bits=9.0), target="sglang:h100")
    assert report.rounding is not None
    assert report.rounding["budget"]["refused_formats"] == ["mxfp8"]
    with pytest.raises(UsageError, match="no weight-only scheme suits"):
        within(llama, tmp_path / "none", text, Budget(bits=9.0), target="sglang:cpu")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_get_formats_that_engines_load(family: str, make_model: MakeModel, text: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", family)
    report = within(model, tmp_path / "out", text, Budget(bits=6.0))
    assert inspect_checkpoint(tmp_path / "out").quantized_bits_per_weight <= 6.0
    experts = {tensor.detail for tensor in report.tensors if "experts" in tensor.name and tensor.action == "quantized"}
    assert "fp8" not in experts  # vLLM loads FP8 experts only with quantized inputs
    for target in ("vllm:h100", "transformers:cpu", "minifloat:cpu"):
        assert check_checkpoint(tmp_path / "out", target).failures == ()


@pytest.mark.parametrize(("bound", "best"), [(0.01, 1), (0.022, 1), (0.04, 3)], ids=["missed", "kept once", "cheapest"])
def test_the_model_is_the_nearest_of_all_attempts(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: float, best: int
) -> None:
    """Divergences are made up, so that a later attempt is worse than an earlier one; options get fewer bits again."""
    made_up = iter([1.0, 0.02, 0.03, 0.025])
    bits = iter([5.0, 7.0, 6.5, 6.0])
    add = _Search.add

    def of_attempt(search: _Search, choice: list[int], _: float) -> None:
        add(search, choice, next(made_up))
        search.measured[-1] = replace(search.measured[-1], bits=next(bits))

    some = [[0] * 8, [1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0]]
    choices = iter([*some, None])
    monkeypatch.setattr(_Search, "add", of_attempt)
    monkeypatch.setattr(_Search, "choose", lambda _: next(choices))
    passes = count_passes(monkeypatch)
    report = within(llama, tmp_path / "out", text, Budget(max_kl=bound))
    assert report.rounding is not None
    assert len(passes) == 1  # of gradients, for all attempts
    found = report.rounding["budget"]
    assert found["reached"] == (bound > 0.02)
    assert found["bits_per_weight"] == found["measured"][best]["bits"]
    richer = [group["format"] != "mxfp4" for group in found["groups"]]
    assert richer == {1: [True] * 4 + [False] * 4, 3: [True, False] * 4}[best]
    overrides = {override.split("=")[1] for override in report.recipe["overrides"]}
    assert overrides == {name for name in (g["format"] for g in found["groups"]) if name != report.recipe["scheme"]}
