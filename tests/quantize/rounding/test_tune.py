"""Tuning lowers the divergence on held-out text, changes codes and norms only, and keeps the best state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_cases import make_text, round_model, scale_channels, split, write_model

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions, TextOptions
from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.model.layouts import compressed_tensors, get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E5M2, ElementFormat
from minifloat.numerics.scheme import get_scheme
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.data import DataOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.rounding import tuning
from minifloat.quantize.rounding.damage import KLMeans
from minifloat.quantize.rounding.methods import RoundingOptions, TuneOptions, get_method
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.student import LatentWeight, Student, cells
from minifloat.quantize.rounding.texts import SplitText
from minifloat.quantize.rounding.tuning import Trainer, tune, tune_cost

CPU = torch.device("cpu")


def even_text(sequences: int, seed: int = 0) -> CalibrationSet:
    """Sequences of 40 random tokens."""
    return CalibrationSet(tuple(sequence[:40] for sequence in make_text(sequences, seed=seed).sequences))


KEPT, HELD_OUT = even_text(20), even_text(4, seed=1)
FEW_STEPS = TuneOptions(steps=12, batch=4, rate=0.02, norm_rate=0.004, every=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@contextmanager
def student(
    folder: Path, work: Path, scheme: str = "mxfp4", method: str = "match", **options: Any
) -> Iterator[tuple[Student, Any, Any]]:
    """A student of a model that a method rounded, with the plan and the rounded model."""
    given = RoundingOptions(method=get_method(method), **{"fold": False, **options})
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, get_scheme(scheme), get_writer(compressed_tensors.NAME))
        with round_checkpoint(checkpoint, plan, split(KEPT, HELD_OUT), given, work) as rounded:
            yield Student(CalibrationModel(checkpoint, CalibrateOptions()), plan, rounded), plan, rounded


def codes_of(plan: QuantizationPlan) -> set[str]:
    return {part.tensors.codes.name for tensor in plan.tensors for part in tensor.parts}


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda element: element.name)
def test_values_inside_a_cell_round_to_its_value_and_values_outside_do_not(element: ElementFormat) -> None:
    table = cells(element)
    values = torch.tensor(element.values)
    finite = values.isfinite()
    values, lower, upper = values[finite], table.lower[finite], table.upper[finite]
    width = upper - lower
    for inside in (lower + 0.01 * width, upper - 0.01 * width):
        assert torch.equal(decode(encode(inside, element), element), values)
    below, above = lower - 0.01 * width, upper + 0.01 * width
    inner = values.abs() < element.max
    assert bool((decode(encode(below, element), element) < values)[inner].all())
    assert bool((decode(encode(above, element), element) > values)[inner].all())
    assert table.top == pytest.approx(float(upper.max()))


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "fp8", "fp8-block"])
def test_latents_start_with_the_codes_of_the_method(scheme: str) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    other = weight.float() + 0.2 * torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    quantized = quantize_tensor(other, get_scheme(scheme).weight)
    latent = LatentWeight(quantized, weight, CPU)
    assert torch.equal(latent.weight(), quantized.dequantize())
    assert latent.changed_codes(latent.quantized()) == 0
    assert torch.equal(latent.quantized().scale, quantized.scale)


def test_gradients_pass_through_the_rounding_in_units_of_the_scale_but_not_beyond_the_outermost_cell() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    quantized = quantize_tensor(weight, get_scheme("mxfp4").weight)
    latent = LatentWeight(quantized, weight, CPU)
    with torch.no_grad():
        latent.values[0, :2] = torch.tensor([7.5, -7.5])
    latent.set_gradient(torch.ones(4, 64))
    gradient = latent.values.grad
    assert gradient is not None
    assert gradient[0, :2].tolist() == [0.0, 0.0]
    scales = quantized.block_scale().repeat_interleave(32, 1)
    assert torch.equal(gradient[1:], scales[1:])
    latent.clamp()
    assert latent.values[0, :2].tolist() == [7.0, -7.0]


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "fp8"])
def test_the_divergence_falls_and_only_codes_and_norms_change(llama: Path, tmp_path: Path, scheme: str) -> None:
    kept, options = even_text(48), TuneOptions(steps=30, batch=16, rate=0.003, every=10)
    with student(llama, tmp_path / "work", scheme, method="nearest") as (start, plan, rounded):
        with Checkpoint.open(llama) as checkpoint:
            result = tune(
                CalibrationModel(checkpoint, CalibrateOptions()), plan, rounded, split(kept, HELD_OUT), options
            )
        tuning = result.record["tuning"]
        assert tuning["before"] == pytest.approx(rounded.held_out["nearest"], rel=0.05)
        assert tuning["after"] < 0.9 * tuning["before"]
        assert tuning["best_step"] > 0
        assert result.record["held_out"]["method"] == tuning["after"]
        assert set(result.arrays) == codes_of(plan) | set(start.norms)
        codes = {name for name in codes_of(plan) if result.arrays[name][2].tobytes() != rounded.read(name).tobytes()}
        assert len(codes) > len(codes_of(plan)) / 2
        assert 0 < tuning["changed"] < 0.2
        assert all(row["changed"] > 0 for row in result.record["weights"])


def test_the_text_of_the_report_is_measured_once_after_the_step_is_chosen(llama: Path, tmp_path: Path) -> None:
    measured: list[tuple[int, float]] = []

    class Watched(Trainer):
        def measure(self, sequences: Sequence[Sequence[int]]) -> KLMeans:
            found = super().measure(sequences)
            measured.append((len(sequences), found.mean))
            return found

    texts = SplitText(even_text(48), even_text(4, seed=1), even_text(3, seed=2))
    options = TuneOptions(steps=30, batch=16, rate=0.003, every=10)
    with student(llama, tmp_path / "work", method="nearest") as (start, _, _):
        training = Watched(start, texts, options, lambda *_: None).run()
    assert sum(mean < measured[0][1] for _, mean in measured[1:-1]) > 1
    assert [size for size, _ in measured] == [4] * (len(measured) - 1) + [3]
    assert training.reported.mean == measured[-1][1]
    assert all(torch.equal(start.latents[m].quantized().codes, w.codes) for m, w in training.best.weights.items())


def test_the_state_of_the_report_is_the_best_one_and_not_the_last(llama: Path, tmp_path: Path) -> None:
    """The rate at the end destroys the model, after a better state was found."""
    texts = SplitText(even_text(48), even_text(4, seed=1), even_text(4, seed=1))
    options = TuneOptions(steps=20, batch=16, rate=0.003, every=10)

    class Broken(Trainer):
        def _step(self, step: int, batch: Sequence[Sequence[int]]) -> float:
            if step == 20:
                for norm in self.student.norms.values():
                    norm.data.fill_(7.0)
            return super()._step(step, batch)

    with student(llama, tmp_path / "work", method="nearest") as (start, _, _):
        training = Broken(start, texts, options, lambda *_: None).run()
    assert training.best.step == 10
    assert training.history[-1][1] > training.best.divergence.mean
    assert training.reported.means == training.best.divergence.means


def test_a_rate_that_destroys_the_model_leaves_the_codes_of_match(llama: Path, tmp_path: Path) -> None:
    match = round_model(llama, tmp_path / "match", KEPT, HELD_OUT, method="match")
    absurd = TuneOptions(steps=4, batch=4, rate=5.0, norm_rate=0.5, every=2)
    tuned = round_model(llama, tmp_path / "tune", KEPT, HELD_OUT, method="tune", tuning=absurd)
    assert tuned.tensors == match.tensors
    assert tuned.held_out == match.held_out


def test_a_loss_that_is_not_finite_ends_the_tuning(llama: Path, tmp_path: Path) -> None:
    overflowing = TuneOptions(steps=4, batch=4, rate=0.02, norm_rate=1e38, every=4)
    match = round_model(llama, tmp_path / "match", KEPT, HELD_OUT, method="match")
    tuned = round_model(llama, tmp_path / "tune", KEPT, HELD_OUT, method="tune", tuning=overflowing)
    assert tuned.tensors == match.tensors


def test_an_interrupted_tuning_continues_with_the_same_bits_and_without_rounding_again(
    llama: Path, tmp_path: Path
) -> None:
    steps: list[str] = []

    def interrupt(done: int, total: int, what: str) -> None:
        if what.startswith("tuning") and done == 7:
            raise KeyboardInterrupt

    def record(done: int, total: int, what: str) -> None:
        steps.append(what)

    whole = round_model(llama, tmp_path / "whole", KEPT, HELD_OUT, method="tune", tuning=FEW_STEPS)
    with pytest.raises(KeyboardInterrupt):
        round_model(llama, tmp_path / "w", KEPT, HELD_OUT, method="tune", tuning=FEW_STEPS, progress=interrupt)
    resumed = round_model(llama, tmp_path / "w", KEPT, HELD_OUT, method="tune", tuning=FEW_STEPS, progress=record)
    assert resumed.tensors == whole.tensors
    assert not any(step.startswith("layer") for step in steps)
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "llama4_text", "qwen3_moe", "qwen2"])
def test_the_student_starts_as_the_rounded_model_and_every_latent_gets_a_gradient(
    model_type: str, tmp_path: Path
) -> None:
    sizes = {"moe_intermediate_size": None} if model_type == "llama4_text" else {}
    folder = write_model(tmp_path / "model", model_type, **sizes)
    with student(folder, tmp_path / "work") as (tuned, plan, rounded):
        parts = {part.module: part for tensor in plan.tensors for part in tensor.parts}
        assert set(tuned.latents) == set(rounded.weights)
        ids = torch.tensor([list(HELD_OUT.sequences[0])])
        for composition in tuned._compositions:
            views = composition.views(composition.base.clone())
            assert sum(view.numel() for view in views) == composition.base.numel()
        for module, latent in tuned.latents.items():
            assert torch.equal(latent.weight(), rounded.quantized(parts[module]).dequantize())
        parameters = tuned.parameters()
        tuned.logits(ids, parameters).float().square().mean().backward()
        tuned.set_gradients(parameters)
        assert all(latent.values.grad is not None for latent in tuned.latents.values())
        assert all(norm.grad is not None and bool(norm.grad.any()) for norm in tuned.norms.values())
        assert len(tuned.norms) >= 5


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_the_student_of_a_folded_model_starts_at_the_divergence_of_the_rounded_model(
    model_type: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", model_type)
    with Checkpoint.open(folder) as checkpoint:
        norms = [name for name in checkpoint.tensors if "layernorm" in name]
    scale_channels(folder, norms)
    with student(folder, tmp_path / "work", fold=True) as (tuned, plan, rounded):
        assert any(fold["folded"] for fold in rounded.folds)
        parts = {part.module: part for tensor in plan.tensors for part in tensor.parts}
        for module, weight in tuned.weights.items():
            error = (rounded.quantized(parts[module]).dequantize() - weight.float()).square().sum()
            assert error < 0.1 * weight.float().square().sum(), module
        kls = []
        for sequence in HELD_OUT.sequences:
            ids = torch.tensor([list(sequence)])
            original, own = tuned.original_logits(ids).float(), tuned.logits(ids, tuned.parameters()).detach().float()
            own, original = own.log_softmax(-1), original.log_softmax(-1)
            kl = torch.nn.functional.kl_div(own, original, reduction="none", log_target=True)
            kls.append(float(kl.sum(-1).mean()))
        assert sum(kls) / len(kls) == pytest.approx(rounded.held_out["method"], rel=0.2)


def test_too_little_memory_is_refused_before_anything_runs(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "available_memory", lambda _: 1_000_000)
    with Checkpoint.open(llama) as checkpoint:
        plan = make_plan(checkpoint, get_scheme("mxfp4"), get_writer(compressed_tensors.NAME))
        needed = tune_cost(checkpoint, plan, torch.bfloat16, max(map(len, KEPT.sequences + HELD_OUT.sequences)))
    assert needed.weights == sum(a * b for a, b in (p.shape for t in plan.tensors for p in t.parts))
    expected = rf"needs {needed.nbytes:,} bytes of memory on cpu to train {needed.weights:,} weights, and 1,000,000"
    with pytest.raises(UsageError, match=expected):
        round_model(llama, tmp_path / "work", KEPT, HELD_OUT, method="tune")
    assert not (tmp_path / "work").exists()
    round_model(llama, tmp_path / "work", KEPT, HELD_OUT, method="match")


def test_quantize_writes_what_tuning_did_into_report_card_and_command(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(6000)))
    rounding = RoundingOptions(method=get_method("tune"), tuning=FEW_STEPS)
    data = DataOptions([text], TextOptions(samples=30, seq_len=64, held_out=0.1), rounding)
    report = quantize_checkpoint(llama_folder, tmp_path / "out", "mxfp4", data=data)
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    tuned = saved["rounding"]["tuned"]
    assert tuned["steps"] == FEW_STEPS.steps
    assert tuned["after"] <= tuned["before"]
    assert [entry[0] for entry in tuned["history"]] == [0, 4, 8, 12]
    assert any("uning" in note for note in report.notes)
    assert any(note in (tmp_path / "out" / "README.md").read_text() for note in report.notes if "uning" in note)
    assert "--method tune" in saved["provenance"]["command"]
    assert saved["recipe"]["rounding"]["tuning"]["rate"] == FEW_STEPS.rate
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert "model.norm.weight" in checkpoint.tensors
