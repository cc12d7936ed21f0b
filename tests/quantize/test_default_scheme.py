"""With text, the default scheme keeps inputs in 16 bits where the verdict of `compare` needs it, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rounding_cases import count_passes

from minifloat.calibration.options import TextOptions
from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check import check_checkpoint
from minifloat.deploy.check.subject import Subject
from minifloat.quantize import planner, rounded
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.preview import preview_quantization
from minifloat.quantize.report import QuantizeReport
from minifloat.quantize.rounding import input_choice

MakeModel = Callable[..., Path]
TEXT = TextOptions(samples=24, seq_len=32, held_out=0.25)


@pytest.fixture(scope="module")
def llama(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with 4 groups in each of 2 layers."""
    return make_llama(tmp_path_factory.mktemp("default") / "llama")


def quantize(model: Path, out: Path, text: Path, scheme: str | None = None, **options: Any) -> QuantizeReport:
    return quantize_checkpoint(model, out, scheme, QuantizeOptions(**options), data=DataOptions([text], TEXT))


def allow(monkeypatch: pytest.MonkeyPatch, kl: float) -> None:
    """Let the verdict allow another divergence, and any top-1."""
    monkeypatch.setattr(input_choice, "_MAX_KL", kl)
    monkeypatch.setattr(input_choice, "MIN_SAME_TOP1", -9.0)


def inputs_of(report: QuantizeReport) -> dict[str, Any]:
    assert report.rounding is not None
    found: dict[str, Any] = report.rounding["inputs"]
    return found


def wide_modules(folder: Path) -> set[str]:
    """The modules whose inputs stay in 16 bits."""
    with Checkpoint.open(folder) as checkpoint:
        subject = Subject.of_checkpoint(checkpoint)
    return {weight.module for weight in subject.quantized if weight.activation is None}


@pytest.fixture(scope="module")
def predicted(llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The divergence with all inputs rounded, and with none."""
    with pytest.MonkeyPatch.context() as patch:
        allow(patch, 1.0)
        report = quantize(llama, tmp_path_factory.mktemp("plain") / "out", text)
    found = inputs_of(report)
    assert report.recipe["scheme"] == "fp8-dynamic"
    assert found["groups"] == []
    return found["predicted"]["all_inputs"]["kl"], found["predicted"]["no_inputs"]["kl"]


def test_the_groups_with_costly_inputs_keep_them_in_16_bits(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, none = predicted
    allow(monkeypatch, (0.6 * every + 0.4 * none) / input_choice.AIM)
    report = quantize(llama, tmp_path / "out", text)
    groups = inputs_of(report)["groups"]
    wide = [group for group in groups if group["16_bit"]]
    assert 0 < len(wide) < len(groups) == 8
    damage = sum(group["damage"] for group in wide)
    assert damage >= 0.39 * sum(group["damage"] for group in groups)
    assert report.recipe["scheme"] == "fp8-dynamic"
    assert any(f"16-bit inputs for {len(wide)} of 8 groups" in note for note in report.notes)
    assert "16-bit inputs for" in (tmp_path / "out" / "README.md").read_text()
    modules = wide_modules(tmp_path / "out")
    assert {"self_attn.q_proj" in m for m in modules} == {"self_attn.k_proj" in m for m in modules}
    assert len(modules) == sum({"qkv": 3, "gate_up": 2}.get(g["group"].split(".")[-1], 1) for g in wide)
    assert check_checkpoint(tmp_path / "out", "vllm:h100").failures == ()
    assert not list(tmp_path.glob("*.minifloat-rounding*"))


def test_all_inputs_stay_in_16_bits_where_most_weights_need_it(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, none = predicted
    for name, share in (("most", 0.05), ("less", -0.5)):
        allow(monkeypatch, (share * every + (1 - share) * none) / input_choice.AIM)
        report = quantize(llama, tmp_path / name, text)
        assert report.recipe["scheme"] == "fp8"
        assert report.recipe["overrides"] == []
        assert any("so the scheme became fp8 instead of fp8-dynamic" in note for note in report.notes)


def test_a_scheme_that_is_named_is_obeyed(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, predicted[1] / 2)
    report = quantize(llama, tmp_path / "out", text, "fp8-dynamic")
    assert report.recipe["scheme"] == "fp8-dynamic"
    assert not wide_modules(tmp_path / "out")
    assert "inputs" not in (report.rounding or {})


def test_the_recorded_command_repeats_the_mixture(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, none = predicted
    allow(monkeypatch, (0.6 * every + 0.4 * none) / input_choice.AIM)
    recipe = quantize(llama, tmp_path / "out", text).recipe
    quantize(llama, tmp_path / "again", text, recipe["scheme"], overrides=recipe["overrides"])
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.read_bytes() for file in files] == [(tmp_path / "again" / f.name).read_bytes() for f in files]


def test_a_miss_leads_to_another_attempt_and_the_last_has_16_bit_inputs(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, none = predicted
    allow(monkeypatch, (0.6 * every + 0.4 * none) / input_choice.AIM)
    monkeypatch.setattr(input_choice, "ACCEPTED", 0.0)
    passes = count_passes(monkeypatch)
    report = quantize(llama, tmp_path / "out", text)
    assert 2 <= len(inputs_of(report)["measured"]) <= input_choice.ATTEMPTS
    assert len(passes) == 1  # of gradients, for all attempts
    assert report.recipe["scheme"] == "fp8"
    assert any("KL of the attempts" in note for note in report.notes)


def test_a_target_that_does_not_load_the_mixture_gets_one_scheme(
    llama: Path, text: Path, predicted: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, none = predicted
    allow(monkeypatch, (0.6 * every + 0.4 * none) / input_choice.AIM)
    monkeypatch.setattr(rounded, "loads_alike", lambda *_: lambda _: False)
    report = quantize(llama, tmp_path / "out", text)
    assert report.recipe["scheme"] == "fp8"
    assert len(wide_modules(tmp_path / "out")) == 14


def test_without_data_a_small_model_is_told_what_is_known(llama: Path, tmp_path: Path) -> None:
    told = "Nothing was measured on this model. fp8-dynamic rounds inputs to E4M3"
    notes = [
        quantize_checkpoint(llama, tmp_path / "default").notes,
        preview_quantization(llama, tmp_path / "none").notes,
        quantize_checkpoint(llama, tmp_path / "named", "fp8-dynamic").notes,
        quantize_checkpoint(llama, tmp_path / "wide", "fp8").notes,
    ]
    assert [any(note.startswith(told) for note in of_run) for of_run in notes] == [True, True, False, False]


def test_a_large_model_is_told_nothing(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_SMALL", 1000)
    assert not any("Nothing was measured" in note for note in preview_quantization(llama, tmp_path / "none").notes)


def test_a_dry_run_with_text_says_what_may_change(llama: Path, tmp_path: Path) -> None:
    for scheme, told in ((None, True), ("fp8-dynamic", False)):
        notes = preview_quantization(llama, tmp_path / "none", scheme, calibrates=True).notes
        assert any("measures what fp8-dynamic costs by rounding inputs" in note for note in notes) is told
        assert not any("Nothing was measured" in note for note in notes)
