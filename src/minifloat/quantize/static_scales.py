"""Static scales in a plan: from activation statistics to the constants that are written beside the weights.

How many activations of held-out text each static scale would saturate is measured here too, from the histograms of a
held-out run: saturation of unseen text is a failure of static quantization that no error reports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import DEFAULT_RULE
from minifloat.calibration.scales import KVScales, StaticScales, activation_scales, kv_scales, saturation
from minifloat.checkpoint import Checkpoint
from minifloat.errors import NotCalibratedError, SaturationError, UsageError
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E2M1, E4M3, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import KVSpec, weight_only, without_static_scales

#: How ``--kv-cache fp8`` stores keys and values.
KV_FP8 = KVSpec(E4M3, TENSOR)


@dataclass(frozen=True)
class ActivationReport:
    """The static scale of the inputs of a linear, or of keys or values."""

    module: str
    amax: float
    scale: float
    tokens: int | None = None  # tokens of calibration text that the module processed; None for keys and values
    saturated: float | None = None  # fraction of held-out elements that would saturate; None without held-out text
    flushed: float | None = None  # fraction of held-out elements that would become zero
    note: str = ""


def apply_calibration(
    plan: QuantizationPlan, checkpoint: Checkpoint, calibration: Calibration | None, *, kv_cache: bool
) -> tuple[QuantizationPlan, tuple[ActivationReport, ...], tuple[str, ...]]:
    """Add static scales to a plan."""
    if calibration is None:
        if kv_cache:
            raise UsageError("an FP8 KV cache needs calibrated scales: give --calibration DATA or --stats FILE")
        return _weight_only(plan), (), _weight_only_notes(plan)
    calibration.stats.check_model(checkpoint)
    static, nested = _static_modules(plan)
    _refuse_drafts(plan, {*static, *nested})
    group_of = {part.module: part.group for tensor in plan.tensors for part in tensor.parts}.__getitem__
    inputs = activation_scales(calibration.stats, calibration.rule, modules=static, group_of=group_of)
    under_divisor = activation_scales(calibration.stats, modules=nested, group_of=group_of)
    caches = kv_scales(calibration.stats, modules=plan.attention_modules) if kv_cache else {}
    divisors = {module: scalar_global_divisor(amax) for module, amax in under_divisor.amax.items()}
    reports = (
        *_input_reports(inputs, calibration, inputs.scales, E4M3),
        *_input_reports(
            under_divisor, calibration, {m: np.float32(E4M3.max) / value for m, value in divisors.items()}, E2M1
        ),
        *_kv_reports(caches),
    )
    _check_saturation(reports, calibration.max_saturation)
    scales = {module: float(scale) for module, scale in inputs.scales.items()}
    scales |= {module: float(divisor) for module, divisor in divisors.items()}
    kv_pairs = {module: (float(pair.k), float(pair.v)) for module, pair in caches.items()}
    fallbacks = {**inputs.fallbacks, **under_divisor.fallbacks}
    notes = [f"{module}: {reason}." for module, reason in fallbacks.items()]
    rule = calibration.rule
    if rule != DEFAULT_RULE and kv_cache:
        notes.insert(0, f"Scales of the KV cache are made by the rule {DEFAULT_RULE}: {rule} needs histograms.")
    if rule != DEFAULT_RULE and nested:
        notes.insert(0, f"Divisors of NVFP4 inputs are made by the rule {DEFAULT_RULE}: {rule} assumes one scale.")
    return plan.with_scales(scales, KV_FP8 if kv_cache else None, kv_pairs), reports, tuple(notes)


def _static_modules(plan: QuantizationPlan) -> tuple[list[str], list[str]]:
    """Return the modules that need the static scale of their input, and those that need a divisor (NVFP4)."""
    static: list[str] = []
    nested: list[str] = []
    schemes = plan.modules
    for module in plan.static_modules:
        activation = schemes[module].activation
        (nested if activation is not None and activation.has_global_scale else static).append(module)
    return static, nested


def _refuse_drafts(plan: QuantizationPlan, modules: Collection[str]) -> None:
    """Refuse static scales of inputs in layers of multi-token prediction, which an override asked for."""
    drafts = [part for tensor in plan.tensors if tensor.drafts for part in tensor.parts if part.module in modules]
    if drafts:
        other = without_static_scales(drafts[0].scheme).name
        raise NotCalibratedError(
            [part.module for part in drafts],
            "no text runs through layers of multi-token prediction, so that their inputs have no static scales; leave "
            f"the override out, or override them with {other}",
        )


def _weight_only(plan: QuantizationPlan) -> QuantizationPlan:
    """Return the plan with weight-only schemes in place of static ones."""
    static = set(plan.static_modules)
    tensors = tuple(
        replace(
            tensor,
            parts=tuple(
                replace(part, scheme=weight_only(part.scheme)) if part.module in static else part
                for part in tensor.parts
            ),
        )
        for tensor in plan.tensors
    )
    return replace(plan, tensors=tensors)


def _weight_only_notes(plan: QuantizationPlan) -> tuple[str, ...]:
    if not plan.static_modules:
        return ()
    modules = plan.modules
    kinds = sorted({f"W{modules[module].weight.element.bits}A16" for module in plan.static_modules})
    return (
        f"{len(plan.static_modules)} weights have a scheme with static activation scales, but no calibration was "
        f"given: no activation scales are written and servers run these weights weight-only ({', '.join(kinds)}).",
    )


def _input_reports(
    inputs: StaticScales, calibration: Calibration, scales: Mapping[str, np.float32], element: ElementFormat
) -> list[ActivationReport]:
    """Return a report per module; `scales` are those of the elements, for NVFP4 of the block with the amax."""
    held_out = {} if calibration.held_out is None else calibration.held_out.inputs
    reports = []
    for module, scale in scales.items():
        stats = held_out.get(module)
        lost = None if stats is None else saturation(stats, float(scale), element)
        reports.append(
            ActivationReport(
                module=module,
                amax=inputs.amax[module],
                scale=float(scale),
                tokens=calibration.stats.inputs[module].total_tokens,
                saturated=None if lost is None else lost.saturated,
                flushed=None if lost is None or element is E2M1 else lost.flushed,
                note=inputs.fallbacks.get(module, ""),
            )
        )
    return reports


def _kv_reports(caches: Mapping[str, KVScales]) -> list[ActivationReport]:
    return [
        ActivationReport(f"{module}.{name}", float(scale) * E4M3.max, float(scale))
        for module, pair in caches.items()
        for name, scale in (("k", pair.k), ("v", pair.v))
    ]


def _check_saturation(reports: Sequence[ActivationReport], limit: float | None) -> None:
    if limit is None:
        return
    measured = [report for report in reports if report.saturated is not None]
    if not measured:
        raise UsageError(
            "a limit on saturation needs held-out text, and the statistics have none: write them again, "
            "with `minifloat calibrate --held-out 0.1`"
        )
    over = sorted(
        (report for report in measured if (report.saturated or 0.0) > limit),
        key=lambda report: -(report.saturated or 0.0),
    )
    if over:
        shown = ", ".join(f"{report.module} {report.saturated:.2e}" for report in over[:4])
        raise SaturationError(
            f"{len(over)} of {len(measured)} inputs saturate on held-out text more often than {limit:g}: {shown}; "
            "calibrate on more or other text, or use the rule max"
        )
