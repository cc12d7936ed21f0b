"""Prints the report of `plan`. Bytes are decimal (GB), as on data sheets."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from minifloat.commands.display.console import make_console, make_table
from minifloat.commands.display.plan_loss import loss_note, loss_table, quality_text
from minifloat.deploy.estimate.hardware import CPU, Hardware
from minifloat.deploy.estimate.memory import MOST_DEVICES
from minifloat.deploy.estimate.model_plan import ModelPlan
from minifloat.deploy.estimate.roofline import Bound
from minifloat.model.plan.overrides import KEEP

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_GIGA, _TERA = 10**9, 10**12


def print_plan(plan: ModelPlan) -> None:
    """Print the model and the hardware, then memory, speed, and the commands to run."""
    console = make_console()
    console.print(escape(_model_line(plan)), soft_wrap=True)
    console.print(escape(_hardware_line(plan)), soft_wrap=True)
    console.print()
    console.print(_cache_table(plan))
    if plan.state:
        console.print(f"State of linear attention or Mamba, besides: {_size(plan.state)} per sequence")
    console.print()
    console.print(_memory_table(plan))
    console.print()
    console.print(_speed_table(plan))
    losses = [loss for scheme in plan.schemes for loss in scheme.losses]
    if losses:
        console.print()
        console.print(loss_table(plan))
    if plan.refused:
        console.print()
    for scheme, reason in plan.refused.items():
        console.print(escape(f"{scheme} cannot hold this model: {reason}"), soft_wrap=True)
    console.print(
        "\nfits: weights, KV cache and activations (an estimate) take at most "
        f"{_size(plan.usable)} of {_size(plan.hardware.memory)} per device.\n"
        "bound: the larger of bytes over bandwidth and operations over peak; memory-bound below the ridge "
        f"(operations per byte).",
        soft_wrap=True,
    )
    if losses:
        console.print(loss_note(losses), soft_wrap=True)
    for note in plan.notes:
        console.print(escape(note), soft_wrap=True)
    console.print()
    _print_commands(plan)


def _model_line(plan: ModelPlan) -> str:
    active = "" if plan.counts.active == plan.counts.total else f", {_count(plan.counts.active)} active per token"
    estimated = " (from config.json alone: an estimate)" if plan.estimated else ""
    return f"{plan.path}: {plan.architecture}, {_count(plan.counts.total)} weights{active}{estimated}"


def _hardware_line(plan: ModelPlan) -> str:
    hardware = plan.hardware
    count = f"{plan.gpus} x " if plan.gpus > 1 else ""
    return (
        f"{count}{hardware.title}: {_size(hardware.memory)}, {hardware.bandwidth / _GIGA:,.0f} GB/s{_peaks(hardware)} "
        f"({hardware.source})"
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
    names = ("per token", f"of {plan.context:,} tokens", f"batch {plan.batch}", "per device")
    table = make_table("KV cache", *names, right=names)
    for cache in plan.caches:
        sizes = (cache.per_token, cache.per_sequence, cache.total, cache.device)
        table.add_row(cache.element, *map(_size, sizes))
    return table


def _memory_table(plan: ModelPlan) -> Table:
    several = plan.gpus > 1
    names = [
        "weights",
        *(["per device"] if several else []),
        "+ KV",
        "+ activations",
        "=",
        "largest batch",
        "with FP8 KV",
    ]
    names.append("largest context")
    table = make_table("scheme", *names, "fits", right=names)
    for scheme in plan.schemes:
        table.add_row(
            scheme.scheme,
            _size(scheme.weights),
            *([_size(scheme.device_weights)] if several else []),
            _size(scheme.cache),
            _size(scheme.activations),
            _size(scheme.taken),
            f"{scheme.largest_batch:,}",
            f"{scheme.largest_batch_fp8:,}",
            f"{scheme.largest_context:,}",
            "yes" if scheme.fits else "no" if scheme.needed_gpus is None else f"on {scheme.needed_gpus}",
        )
    return table


def _speed_table(plan: ModelPlan) -> Table:
    decode = ("decode ms", "tokens/s", "intensity", "ridge")
    prefill = ("prefill ms", "prompt tok/s")
    table = make_table(
        "scheme",
        "multiplies in",
        *decode,
        "bound",
        *prefill,
        "bound",
        right=(*decode, *prefill),
    )
    for scheme in plan.schemes:
        table.add_row(
            scheme.scheme,
            scheme.arithmetic,
            *_times(scheme.decode),
            f"{scheme.decode.intensity:,.1f}",
            "" if scheme.decode.ridge is None else f"{scheme.decode.ridge:,.0f}",
            scheme.decode.limit,
            *_times(scheme.prefill),
            scheme.prefill.limit,
        )
    return table


def _times(bound: Bound) -> tuple[str, str]:
    rate = bound.throughput
    return f"{1e3 * bound.seconds:,.3g}", f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _print_commands(plan: ModelPlan) -> None:
    console = make_console()
    fastest = plan.fastest
    if fastest is None:
        console.print(escape(_nothing_fits(plan)), soft_wrap=True)
        return
    chosen = plan.schemes[-1] if len(plan.schemes) == 2 else fastest
    if not chosen.fits:
        devices = "" if chosen.needed_gpus is None else f" (it needs {chosen.needed_gpus} devices)"
        console.print(f"{chosen.scheme} does not fit{devices}; {fastest.scheme} does.")
        chosen = fastest
    elif len(plan.schemes) > 2:
        console.print(
            escape(f"Fastest of what fits, at the bound: {chosen.scheme}{quality_text(chosen)}"), soft_wrap=True
        )
        other = next((scheme for scheme in plan.schemes if scheme.fits and scheme.scheme == KEEP), plan.least_loss)
        if other is not None and other is not chosen:
            name, slower = f"{other.scheme}{quality_text(other)}", other.decode.seconds / chosen.decode.seconds
            line = f"Least loss of what fits: {name}; a decode step takes {slower:.2f} x as long"
            console.print(escape(line), soft_wrap=True)
    for command in chosen.commands:
        console.print(escape(f"    {command}"), soft_wrap=True)


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
        f"{smallest.scheme} takes least, {_size(smallest.taken)} per device, of which {_size(plan.usable)} are usable"
    )
    if plan.hardware.name == CPU:
        return f"Nothing fits: {needed}. Take {shorter}."
    return (
        f"Nothing fits, and no number of devices up to {MOST_DEVICES} that can share this model holds it: {needed}. "
        f"Take {shorter}."
    )


def _size(nbytes: float) -> str:
    for name, unit in _UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:.0f} B"


def _count(number: int) -> str:
    """Return a number of weights such as ``70.6B`` or ``4.2M``."""
    for name, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,}"
