"""What `plan` says: the model and the hardware, then memory, speed, known losses, and the commands to run."""

from __future__ import annotations

from minifloat.deploy.estimate.hardware import CPU, Hardware
from minifloat.deploy.estimate.model_plan import MEASURED_MODELS, KnownLoss, Measured, ModelPlan, SchemeEstimate
from minifloat.deploy.estimate.roofline import Bound
from minifloat.deploy.estimate.weights import MOST_DEVICES
from minifloat.model.plan.overrides import KEEP
from minifloat.numerics.scheme import SCHEMES
from minifloat.report.document import Bullets, Code, Column, Document, Section, Table, Text, columns, section
from minifloat.report.text import decimal_size

_GIGA, _TERA = 10**9, 10**12
_NOT_MEASURED = "not measured"


def document(plan: ModelPlan) -> Document:
    """Return the estimate for each scheme, and last what to run."""
    state = f"State of linear attention or Mamba, besides: {decimal_size(plan.state)} per sequence"
    losses = [loss for scheme in plan.schemes for loss in scheme.losses]
    return Document(
        plan.path,
        [
            section(
                "",
                Text(_model_line(plan)),
                Text(_hardware_line(plan)),
                _cache_table(plan),
                Text(state if plan.state else ""),
            ),
            section("", _memory_table(plan), _speed_table(plan), _loss_table(plan) if losses else None),
            section("", Bullets([f"{name} cannot hold this model: {reason}" for name, reason in plan.refused.items()])),
            section(
                "",
                Text(
                    "fits: weights, KV cache and activations (an estimate) take at most "
                    f"{decimal_size(plan.usable)} of {decimal_size(plan.hardware.memory)} per device."
                ),
                Text(
                    "bound: the larger of bytes over bandwidth and operations over peak; memory-bound below the ridge "
                    "(operations per byte)."
                ),
                *([Bullets(_loss_notes(losses))] if losses else []),
                *map(Text, plan.notes),
            ),
            _advice(plan),
        ],
    )


def _model_line(plan: ModelPlan) -> str:
    active = "" if plan.counts.active == plan.counts.total else f", {_count(plan.counts.active)} active per token"
    estimated = " (from config.json alone: an estimate)" if plan.estimated else ""
    return f"{plan.path}: {plan.architecture}, {_count(plan.counts.total)} weights{active}{estimated}"


def _hardware_line(plan: ModelPlan) -> str:
    hardware = plan.hardware
    count = f"{plan.gpus} x " if plan.gpus > 1 else ""
    return (
        f"{count}{hardware.title}: {decimal_size(hardware.memory)}, {hardware.bandwidth / _GIGA:,.0f} GB/s"
        f"{_peaks(hardware)} ({hardware.source})"
    )


def _peaks(hardware: Hardware) -> str:
    if not hardware.peaks:
        return ""
    peaks = ", ".join(f"{element.name} {_teraflops(peak)}" for element, peak in hardware.peaks.items())
    ridges = ", ".join(f"{element.name} {ridge:,.0f}" for element, ridge in hardware.ridges.items())
    return f"; dense TFLOP/s {peaks}; ridge {ridges}"


def _teraflops(peak: float) -> str:
    """Return a peak in TFLOP/s: whole numbers as on data sheets, two digits of a processor's fraction of one."""
    rate = peak / _TERA
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _cache_table(plan: ModelPlan) -> Table:
    rows = [
        [cache.element, *map(decimal_size, (cache.per_token, cache.per_sequence, cache.total, cache.device))]
        for cache in plan.caches
    ]
    names = ("per token", f"of {plan.context:,} tokens", f"batch {plan.batch}", "per device")
    return Table(columns("KV cache", *names), rows)


def _memory_table(plan: ModelPlan) -> Table:
    several = ["per device"] if plan.gpus > 1 else []
    numbers = ("+ KV", "+ activations", "=", "largest batch", "with FP8 KV", "largest context")
    rows = [
        [
            scheme.scheme,
            decimal_size(scheme.weights),
            *([decimal_size(scheme.device_weights)] if several else []),
            *map(decimal_size, (scheme.cache, scheme.activations, scheme.taken)),
            f"{scheme.largest_batch:,}",
            f"{scheme.largest_batch_fp8:,}",
            f"{scheme.largest_context:,}",
            "yes" if scheme.fits else "no" if scheme.needed_gpus is None else f"on {scheme.needed_gpus}",
        ]
        for scheme in plan.schemes
    ]
    return Table(columns("scheme", "weights", *several, *numbers, Column("fits", left=True)), rows)


def _speed_table(plan: ModelPlan) -> Table:
    rows = [
        [
            scheme.scheme,
            scheme.arithmetic,
            *_times(scheme.decode),
            f"{scheme.decode.intensity:,.1f}",
            "" if scheme.decode.ridge is None else f"{scheme.decode.ridge:,.0f}",
            scheme.decode.limit,
            *_times(scheme.prefill),
            scheme.prefill.limit,
        ]
        for scheme in plan.schemes
    ]
    arithmetic, bound = Column("multiplies in", left=True), Column("bound", left=True)
    decode = ("decode ms", "tokens/s", "intensity", "ridge")
    return Table(columns("scheme", arithmetic, *decode, bound, "prefill ms", "prompt tok/s", bound), rows)


def _times(bound: Bound) -> tuple[str, str]:
    rate = bound.throughput
    return f"{1e3 * bound.seconds:,.3g}", f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _loss_table(plan: ModelPlan) -> Table:
    rows = []
    for scheme in plan.schemes:
        if scheme.scheme in SCHEMES:
            by_model = {loss.model: loss for loss in scheme.losses}
            rows.append([scheme.scheme, *(cell for model in MEASURED_MODELS for cell in _loss(by_model.get(model)))])
    return Table(columns("scheme", *(f"{m}: {what}" for m in MEASURED_MODELS for what in ("perplexity", "KL"))), rows)


def _loss(loss: KnownLoss | None) -> tuple[str, str]:
    """Return the change of perplexity and the KL divergence."""
    if loss is None:
        return _NOT_MEASURED, _NOT_MEASURED
    return _measured(loss.ppl_increase, "+.2%"), _measured(loss.kl, ".4f")


def _measured(measured: Measured, style: str) -> str:
    if measured.low is None or measured.high is None:
        return format(measured.value, style)
    ends = [format(end, style).removesuffix("%").removeprefix("+") for end in (measured.low, measured.high)]
    return f"{measured.value:{style}} [{', '.join(ends)}]"


def _loss_notes(losses: list[KnownLoss]) -> list[str]:
    """Say where the figures of the table come from."""
    texts, dates = ({getattr(loss, name) for loss in losses} for name in ("text", "date"))
    return [
        f"loss: change of perplexity and mean KL (nats per token) with 95% intervals on {', '.join(sorted(texts))}, "
        f"{', '.join(sorted(dates))}, of SmolLM2-135M",
        "(docs/results.md), rounded to nearest and with --data self. So small a model loses much. Yours may lose more "
        "or less: `minifloat compare` measures it.",
    ]


def _quality_text(scheme: SchemeEstimate) -> str:
    """Say in parentheses what is known of the loss."""
    if scheme.scheme == KEEP:
        return " (the model as it is)"
    if not scheme.losses:
        return " (its loss was not measured)"
    first = scheme.losses[0]
    kl = _measured(first.kl, ".4f")
    return f" (on {first.model}: perplexity {_measured(first.ppl_increase, '+.2%')}, KL {kl})"


def _advice(plan: ModelPlan) -> Section:
    """Return the commands for the fastest scheme that fits, or what would fit."""
    fastest = plan.fastest
    if fastest is None:
        return section("", Text(_nothing_fits(plan)))
    chosen = plan.schemes[-1] if len(plan.schemes) == 2 else fastest
    lines = []
    if not chosen.fits:
        devices = "" if chosen.needed_gpus is None else f" (it needs {chosen.needed_gpus} devices)"
        lines.append(f"{chosen.scheme} does not fit{devices}; {fastest.scheme} does.")
        chosen = fastest
    elif len(plan.schemes) > 2:
        lines.append(f"Fastest of what fits, at the bound: {chosen.scheme}{_quality_text(chosen)}")
        other = next((scheme for scheme in plan.schemes if scheme.fits and scheme.scheme == KEEP), plan.least_loss)
        if other is not None and other is not chosen:
            name, slower = f"{other.scheme}{_quality_text(other)}", other.decode.seconds / chosen.decode.seconds
            lines.append(f"Least loss of what fits: {name}; a decode step takes {slower:.2f} x as long")
    return section("", Bullets(lines), Code("\n".join(chosen.commands)))


def _nothing_fits(plan: ModelPlan) -> str:
    """Say what would fit: on how many devices under which scheme, or in how much memory."""
    shorter = "a shorter context (--context), a smaller batch (--batch) or an FP8 KV cache (--kv-cache-dtype fp8)"
    by_number = sorted({scheme.needed_gpus for scheme in plan.schemes if scheme.needed_gpus is not None})
    if by_number:
        groups = [
            f"{number} devices (--gpus {number}) for "
            f"{', '.join(scheme.scheme for scheme in plan.schemes if scheme.needed_gpus == number)}"
            for number in by_number
        ]
        return f"Nothing fits. It takes {', '.join(groups)}; or {shorter}."
    smallest = min(plan.schemes, key=lambda scheme: scheme.taken)
    needed = (
        f"{smallest.scheme} takes least, {decimal_size(smallest.taken)} per device, of which "
        f"{decimal_size(plan.usable)} are usable"
    )
    if plan.hardware.name == CPU:
        return f"Nothing fits: {needed}. Take {shorter}."
    return (
        f"Nothing fits, and no number of devices up to {MOST_DEVICES} that can share this model holds it: {needed}. "
        f"Take {shorter}."
    )


def _count(number: int) -> str:
    """Return a number of weights such as ``70.6B`` or ``4.2M``."""
    for name, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,}"
