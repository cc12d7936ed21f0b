"""Prints the report of `quantize`. No computation here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from minifloat.commands.display.console import make_console, make_table, print_engines, print_outcome, shape_text
from minifloat.commands.display.rounding import print_rounding
from minifloat.model.plan.share import QuantizedShare
from minifloat.quantize.preview import PlannedTensor, QuantizePreview
from minifloat.quantize.report import QuantizeReport, TensorReport
from minifloat.quantize.static_scales import ActivationReport
from minifloat.report.text import layer_pattern, size_text


def print_quantize_report(report: QuantizeReport, *, verbose: bool) -> None:
    """Print a row per tensor, or one for the same tensor of all layers unless `verbose`; then the totals."""
    console = make_console()
    groups: dict[tuple[str, str, str], list[TensorReport]] = {}
    for tensor in report.tensors:
        name = tensor.name if verbose else layer_pattern(tensor.name)
        groups.setdefault((name, tensor.action, tensor.detail), []).append(tensor)
    numbers = ("count", "bytes", "SQNR dB", "worst dB", "saturated", "flushed")
    table = make_table("tensor", "count", "shape", "becomes", "bytes", *numbers[2:], right=numbers)
    for (name, action, detail), tensors in groups.items():
        table.add_row(
            name,
            str(len(tensors)),
            shape_text({tensor.shape for tensor in tensors}),
            detail if action == "quantized" else f"{action} ({detail})",
            size_text(sum(tensor.output_bytes for tensor in tensors)),
            *_error_cells(tensors),
        )
    console.print(table)
    if report.activations:
        console.print()
        console.print(_activation_table(report.activations, verbose=verbose))
    if report.rounding is not None:
        console.print()
        print_rounding(console, report.rounding, verbose=verbose)
    total = report.total
    dropped = f", {report.count('dropped')} dropped" if report.count("dropped") else ""
    console.print(
        f"\n{len(report.tensors)} tensors: {len(report.quantized)} quantized, "
        f"{report.count('copied')} copied{dropped}. "
        f"{size_text(report.source_bytes)} -> {size_text(report.output_bytes)} "
        f"({report.source_bytes / max(report.output_bytes, 1):.2f}x smaller). "
        f"SQNR {total.sqnr_db:.2f} dB. {report.seconds:.2f} s."
    )
    console.print(f"{report.share}{_kept(report.share)}.", soft_wrap=True, highlight=False, markup=False)
    print_outcome(console, report)
    print_engines(console, report.engines)


def print_preview(preview: QuantizePreview, *, verbose: bool) -> None:
    """Print a row per tensor, or one for the same tensor of all layers unless `verbose`; then totals and verdicts."""
    console = make_console()
    groups: dict[tuple[str, str, bool], list[PlannedTensor]] = {}
    for tensor in preview.tensors:
        name = tensor.name if verbose else layer_pattern(tensor.name)
        groups.setdefault((name, tensor.becomes, tensor.quantized), []).append(tensor)
    table = make_table("tensor", "count", "shape", "becomes", "bytes", right=("count", "bytes"))
    for (name, becomes, quantized), tensors in groups.items():
        table.add_row(
            name,
            str(len(tensors)),
            shape_text({tensor.shape for tensor in tensors}),
            becomes if quantized else f"copied ({becomes})",
            size_text(sum(tensor.output_bytes for tensor in tensors)),
        )
    console.print(table)
    console.print(
        f"\n{len(preview.tensors)} tensors: {sum(tensor.quantized for tensor in preview.tensors)} to quantize in "
        f"{preview.layout}. {size_text(preview.source_bytes)} -> {size_text(preview.output_bytes)} "
        f"({preview.source_bytes / max(preview.output_bytes, 1):.2f}x smaller)."
    )
    console.print(f"{preview.share}{_kept(preview.share)}.", soft_wrap=True, highlight=False, markup=False)
    for note in preview.notes:
        console.print(f"Note: {note}", soft_wrap=True, markup=False)
    print_engines(console, preview.engines)
    room = "enough" if preview.fits_on_disk else f"too little: {size_text(preview.output_bytes)} are needed"
    console.print(
        f"\nDisk: {size_text(preview.disk_free)} free, {room}. Nothing was written (--dry-run).", soft_wrap=True
    )


def _kept(share: QuantizedShare) -> str:
    """Return what the rest of the linear weights is; empty if there is none."""
    reasons = ", ".join(f"{group.reason} {size_text(group.nbytes)}" for group in share.kept)
    return f"; kept: {reasons}" if reasons else ""


def _activation_table(activations: Sequence[ActivationReport], *, verbose: bool) -> Table:
    """Return a table of static scales, with the worst saturation and flushing on held-out text in each group."""
    groups: dict[str, list[ActivationReport]] = {}
    for activation in activations:
        groups.setdefault(activation.module if verbose else layer_pattern(activation.module), []).append(activation)
    numbers = ("count", "tokens", "smallest scale", "largest scale", "saturated", "flushed")
    table = make_table("static scale of", *numbers, right=numbers)
    for name, members in groups.items():
        tokens = [member.tokens for member in members if member.tokens is not None]
        table.add_row(
            name,
            str(len(members)),
            f"{min(tokens):,}" if tokens else "",
            f"{min(member.scale for member in members):.4g}",
            f"{max(member.scale for member in members):.4g}",
            _worst_fraction([member.saturated for member in members]),
            _worst_fraction([member.flushed for member in members]),
        )
    return table


def _worst_fraction(fractions: Sequence[float | None]) -> str:
    measured = [fraction for fraction in fractions if fraction is not None]
    return (f"{max(measured):.1e}" if max(measured) else "0") if measured else ""


def _error_cells(tensors: list[TensorReport]) -> tuple[str, str, str, str]:
    stats = [tensor.stats for tensor in tensors if tensor.stats is not None]
    if not stats:
        return ("", "", "", "")
    total = sum(stats[1:], stats[0])
    worst = min(errors.sqnr_db for errors in stats)
    return (
        f"{total.sqnr_db:.2f}",
        f"{worst:.2f}",
        f"{total.saturated_fraction:.1e}" if total.saturated else "0",
        f"{total.flushed_fraction:.1e}" if total.flushed else "0",
    )
