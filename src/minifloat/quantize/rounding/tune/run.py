"""`tune`: train the codes and norms of a rounded model, and return what changes in the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.model import CalibrationModel
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.rounding.grid import error_of
from minifloat.quantize.rounding.layer import tensor_bytes
from minifloat.quantize.rounding.rounded_model import Bytes, RoundedModel, layer_content
from minifloat.quantize.rounding.tune.options import TuneOptions
from minifloat.quantize.rounding.tune.student import Student
from minifloat.quantize.rounding.tune.train import Trainer, Training


def tune(
    model: CalibrationModel,
    plan: QuantizationPlan,
    rounded: RoundedModel,
    kept: CalibrationSet,
    held_out: CalibrationSet,
    options: TuneOptions,
    progress: Progress | None = None,
) -> ArrayContent:
    """Train codes and norms against the original logits, and return the best state on held-out text."""

    def report(step: int, text: str) -> None:
        if progress is not None:
            progress(step, options.steps, text)

    student = Student(model, plan, rounded)
    trained = sum(latent.values.numel() for latent in student.latents.values())
    training = Trainer(student, kept, held_out, options, report).run()
    parts = {part.module: part for tensor in plan.tensors for part in tensor.parts}
    tensors: dict[str, Bytes] = {name: tensor_bytes(norm) for name, norm in training.best.norms.items()}
    rows, changed = [], 0
    for module, weight in training.best.weights.items():
        part, latent = parts[module], student.latents[module]
        tensors[part.tensors.codes.name] = tensor_bytes(weight.codes)
        differing = latent.changed_codes(weight)
        changed += differing
        stats = asdict(error_of(student.weights[module].float().cpu(), weight))
        rows.append({**rounded.weights[module], "stats": stats, "changed": differing / latent.values.numel()})
    record = _record(training, options, changed / max(trained, 1), rounded.held_out)
    return layer_content(tensors, {"weights": rows, **record})


def _record(training: Training, options: TuneOptions, changed: float, held_out: Mapping[str, Any]) -> dict[str, Any]:
    best, first = training.best, training.first
    if best.step:
        held_out = {**held_out, "method": best.divergence.mean, "method_error": best.divergence.error}
    tuning = {
        **options.to_dict(),
        "before": first.mean,
        "after": best.divergence.mean,
        "best_step": best.step,
        "changed": changed,
        "history": [list(entry) for entry in training.history],
        "stopped": training.stopped,
    }
    return {"held_out": dict(held_out), "tuning": tuning}
