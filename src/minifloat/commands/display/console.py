"""How reports look on a terminal: tables, grouped by layer, and the progress bar. No computation here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from minifloat.layouts.inspection import Inspection
from minifloat.quantize.calibrated import ActivationReport
from minifloat.quantize.report import QuantizeReport, TensorReport
from minifloat.report.text import layer_pattern, size_text
from minifloat.runtime.diagnosis import Diagnosis

if TYPE_CHECKING:
    from minifloat.publish.push import PushReport
    from minifloat.report.progress import Progress as ProgressCallback


def make_console() -> Console:
    """Standard output; a pipe gets enough columns that no row is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


@contextlib.contextmanager
def progress_bar(enabled: bool) -> Iterator[ProgressCallback | None]:
    """A bar on standard error while a command runs; None where it is not wanted or nobody would see it."""
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def advance(done: int, total: int, message: str) -> None:
            bar.update(task, completed=done, total=total, description=message)

        yield advance


def make_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """A table without lines, whose rows are never broken; the columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def _shape(shapes: set[tuple[int, ...]]) -> str:
    return "x".join(map(str, next(iter(shapes)))) if len(shapes) == 1 else "various"


# ------------------------------------------------------------------------------------------------- quantize


def print_quantize_report(report: QuantizeReport, *, verbose: bool) -> None:
    """Every tensor is in a row; unless `verbose`, the same tensor of all layers shares one."""
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
            _shape({tensor.shape for tensor in tensors}),
            detail if action == "quantized" else f"copied ({detail})",
            size_text(sum(tensor.output_bytes for tensor in tensors)),
            *_error_cells(tensors),
        )
    console.print(table)
    if report.activations:
        console.print()
        console.print(_activation_table(report.activations, verbose=verbose))
    total = report.total
    console.print(
        f"\n{len(report.tensors)} tensors: {len(report.quantized)} quantized, "
        f"{len(report.tensors) - len(report.quantized)} copied. "
        f"{size_text(report.source_bytes)} -> {size_text(report.output_bytes)} "
        f"({report.source_bytes / max(report.output_bytes, 1):.2f}x smaller). "
        f"SQNR {total.sqnr_db:.2f} dB. {report.seconds:.2f} s."
    )
    if report.resumed_shards:
        console.print(f"{report.resumed_shards} shards were taken over from an interrupted run.")
    for note in report.notes:
        console.print(f"Note: {note}")
    console.print(f"Written to {report.destination}")


def _activation_table(activations: Sequence[ActivationReport], *, verbose: bool) -> Table:
    """Static scales, and the worst that they would have done to held-out text in any of the modules of a row."""
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
    worst = min(one.sqnr_db for one in stats)
    return (
        f"{total.sqnr_db:.2f}",
        f"{worst:.2f}",
        f"{total.saturated_fraction:.1e}" if total.saturated else "0",
        f"{total.flushed_fraction:.1e}" if total.flushed else "0",
    )


# ------------------------------------------------------------------------------------------------- inspect


def print_inspection(inspection: Inspection, *, verbose: bool) -> None:
    """What the checkpoint is, bytes by kind and by format, then the tensors."""
    console = make_console()
    console.print(f"{inspection.path}: {inspection.architecture}, {inspection.shards} file(s)")
    layout = inspection.layout or "not quantized"
    kv_cache = f", KV cache {inspection.kv_cache}" if inspection.kv_cache else ""
    console.print(f"layout: {layout}{kv_cache}")
    bits = inspection.quantized_bits_per_weight
    quantized = "" if math.isnan(bits) else f"; quantized weights alone {bits:.2f}"
    console.print(
        f"{inspection.elements:,} weights, {size_text(inspection.nbytes)}, "
        f"{inspection.bits_per_weight:.2f} bits per weight{quantized}\n"
    )
    for attribute in ("kind", "format"):
        table = make_table(
            attribute, "tensors", "weights", "bytes", "share", right=("tensors", "weights", "bytes", "share")
        )
        for key, (count, elements, nbytes) in inspection.by(attribute).items():
            share = f"{nbytes / max(inspection.nbytes, 1):.1%}"
            table.add_row(key, str(count), f"{elements:,}", size_text(nbytes), share)
        console.print(table)
        console.print()
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in inspection.rows:
        name = row.name if verbose else layer_pattern(row.name)
        groups.setdefault((name, row.kind, row.format), []).append(row)
    table = make_table("tensor", "count", "shape", "kind", "format", "bytes", right=("count", "bytes"))
    for (name, kind, form), rows in groups.items():
        size = size_text(sum(row.nbytes for row in rows))
        table.add_row(name, str(len(rows)), _shape({row.shape for row in rows}), kind, form, size)
    console.print(table)
    if inspection.ignored_files:
        console.print(f"\nNot named by the index, ignored: {', '.join(inspection.ignored_files)}")


# ------------------------------------------------------------------------------------------------- push


def print_push(report: PushReport) -> None:
    """The files that went, or would go, and the address."""
    console = make_console()
    table = make_table("file", "bytes", right=("bytes",))
    for name, nbytes in report.files.items():
        table.add_row(escape(name), size_text(nbytes))
    console.print(table)
    console.print(f"\n{len(report.files)} files, {size_text(report.nbytes)}.")
    if report.left:
        console.print(escape(f"Left here: {', '.join(report.left)}"), soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}")
    if report.url is None:
        console.print(f"Nothing was sent to {report.repo_id}: a dry run.")
    else:
        console.print(report.url, soft_wrap=True)


# ------------------------------------------------------------------------------------------------- doctor


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Versions, cores, kernels, advice."""
    console = make_console()
    table = make_table("what", "found")
    for name, version in diagnosis.versions.items():
        table.add_row(name, version)
    table.add_row("cores", str(diagnosis.cores))
    quota = diagnosis.cpu_quota
    table.add_row("CPU time limit", "none" if quota is None else f"{quota:.3g} cores (control group)")
    table.add_row("threads at most", str(diagnosis.threads))
    table.add_row("OpenMP", ", ".join(diagnosis.openmp) or "none seen")
    table.add_row("native kernels", diagnosis.instruction_set or "none")
    console.print(table)
    for line in diagnosis.advice:
        console.print(f"\n{line}")
