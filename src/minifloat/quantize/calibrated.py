"""Static scales in a plan: from activation statistics to the constants that are written beside the weights.

What a static scale would have done to text that it was not made from is measured here too, from the histograms of a
held-out run: saturation that stays is how static quantization fails in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from minifloat.calibration.rules import Rule, history_rule
from minifloat.calibration.scales import KVScales, StaticScales, activation_scales, kv_scales, saturation
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import SaturationError, UsageError
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import KVSpec, weight_only
from minifloat.plan.quantization import Plan

#: How ``--kv-cache fp8`` stores keys and values.
KV_FP8 = KVSpec(E4M3, TENSOR)


@dataclass(frozen=True)
class ActivationReport:
    """The static scale of one input.

    Attributes:
        module: Name of the linear, or of the attention with ``.k`` or ``.v``.
        amax: What the largest value of the format stands for.
        scale: float32 that multiplies to dequantize.
        tokens: Tokens of calibration text that the module saw; None for keys and values.
        saturated: Fraction of held-out elements that would saturate; None where nothing was held out.
        flushed: Fraction of held-out elements that would become zero; None where nothing was held out.
        note: Why the scale is not the module's own, if it is not.
    """

    module: str
    amax: float
    scale: float
    tokens: int | None = None
    saturated: float | None = None
    flushed: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Calibration:
    """What `quantize_checkpoint` is told about activations.

    Attributes:
        stats: What calibration saw.
        rule: Statistics to amax.
        held_out: What a run over other text saw, with histograms; None: nothing was held out.
        max_saturation: Largest fraction of held-out elements of any module that may saturate; None: no limit.
    """

    stats: ActivationStats
    rule: Rule
    held_out: ActivationStats | None = None
    max_saturation: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: what the scales were made from, and by which rule."""
        return {
            "rule": str(self.rule),
            "data": dict(self.stats.data),
            "sequences": self.stats.sequences,
            "tokens": self.stats.tokens,
            "held_out_tokens": None if self.held_out is None else self.held_out.tokens,
        }


def apply_calibration(
    plan: Plan, checkpoint: Checkpoint, calibration: Calibration | None, *, kv_cache: bool
) -> tuple[Plan, tuple[ActivationReport, ...], tuple[str, ...]]:
    """Give a plan its static scales.

    Without calibration, weights whose scheme wants static scales are written for weight-only use, and a note says so.

    Args:
        plan: What becomes of every tensor.
        checkpoint: The source; the statistics must be of it.
        calibration: None: there is none.
        kv_cache: Whether scales of an FP8 KV cache are written.

    Returns:
        The plan, a report per scale, and notes for the user.

    Raises:
        UsageError: KV scales without calibration: scales that are all 1.0 lose accuracy in silence.
        StatsError: The statistics are of another model.
        NotCalibratedError: A module was not seen; it is named.
        SaturationError: More held-out elements saturate than is allowed.
    """
    if calibration is None:
        if kv_cache:
            raise UsageError("an FP8 KV cache needs calibrated scales: give --calibration DATA or --stats FILE")
        return _without_static(plan), (), _note(plan)
    calibration.stats.check_model(checkpoint)
    inputs = activation_scales(calibration.stats, calibration.rule, modules=plan.static_modules)
    kv_rule, kv_note = _kv_rule(calibration.rule) if kv_cache else (calibration.rule, ())
    caches = kv_scales(calibration.stats, kv_rule, modules=plan.attention_modules) if kv_cache else {}
    reports = (*_input_reports(inputs, calibration), *_kv_reports(caches))
    _check_saturation(reports, calibration.max_saturation)
    scales = {module: float(scale) for module, scale in inputs.scales.items()}
    pairs = {module: (float(one.k), float(one.v)) for module, one in caches.items()}
    notes = (*kv_note, *(f"{module}: {reason}." for module, reason in inputs.fallbacks.items()))
    return plan.with_scales(scales, KV_FP8 if kv_cache else None, pairs), reports, notes


def _kv_rule(rule: Rule) -> tuple[Rule, tuple[str, ...]]:
    """The rule for keys and values, of which no histograms are kept, and a note where it is another than for inputs."""
    possible = history_rule(rule)
    if possible is rule:
        return rule, ()
    return possible, (f"Scales of the KV cache are made by the rule {possible}: {rule} needs histograms.",)


def _without_static(plan: Plan) -> Plan:
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


def _note(plan: Plan) -> tuple[str, ...]:
    if not plan.static_modules:
        return ()
    return (
        f"{len(plan.static_modules)} weights have a scheme with static activation scales, but no calibration was "
        "given: no activation scales are written and servers run these weights weight-only (W8A16).",
    )


def _input_reports(inputs: StaticScales, calibration: Calibration) -> list[ActivationReport]:
    held_out = {} if calibration.held_out is None else calibration.held_out.inputs
    reports = []
    for module, scale in inputs.scales.items():
        seen = held_out.get(module)
        lost = None if seen is None else saturation(seen, float(scale))
        reports.append(
            ActivationReport(
                module=module,
                amax=inputs.amax[module],
                scale=float(scale),
                tokens=calibration.stats.inputs[module].total_tokens,
                saturated=None if lost is None else lost.saturated,
                flushed=None if lost is None else lost.flushed,
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
        raise UsageError("a limit on saturation needs held-out text: calibrate with --held-out")
    over = sorted(
        (report for report in measured if (report.saturated or 0.0) > limit),
        key=lambda report: -(report.saturated or 0.0),
    )
    if over:
        shown = ", ".join(f"{report.module} {report.saturated:.2e}" for report in over[:4])
        raise SaturationError(
            f"{len(over)} of {len(measured)} inputs saturate on held-out text more often than {limit:g}: {shown}; "
            "calibrate on more or other text, or choose the rule max"
        )
