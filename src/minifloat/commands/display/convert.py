"""Prints the report of `convert`. No computation here."""

from __future__ import annotations

from minifloat.commands.display.console import make_console, make_table, print_engines, print_outcome
from minifloat.quantize.convert.report import ConvertedTensor, ConvertReport
from minifloat.report.text import layer_pattern, size_text


def print_convert_report(report: ConvertReport, *, verbose: bool) -> None:
    """Print a row per tensor, or one for the same tensor of all layers unless `verbose`; then the totals."""
    console = make_console()
    groups: dict[tuple[str, str, str, str], list[ConvertedTensor]] = {}
    for tensor in report.tensors:
        names = [tensor.name, tensor.becomes or ""]
        if not verbose:
            names = [layer_pattern(name) for name in names]
        groups.setdefault((names[0], names[1], tensor.action, tensor.detail), []).append(tensor)
    table = make_table("tensor", "count", "becomes", "how", "bytes", right=("count", "bytes"))
    for (name, becomes, action, detail), tensors in groups.items():
        how = detail if action == "converted" else f"{action} ({detail})"
        size = size_text(sum(tensor.output_bytes for tensor in tensors))
        table.add_row(name, str(len(tensors)), "" if becomes == name else becomes, how, size)
    console.print(table)
    target = f"layout {report.layout}" if report.layout else report.dtype
    console.print(
        f"\n{report.source_layout} to {target}. {len(report.tensors)} tensors: {report.count('converted')} converted, "
        f"{report.count('copied')} copied, {report.count('dropped')} dropped. "
        f"{size_text(report.source_bytes)} -> {size_text(report.output_bytes)}. {report.seconds:.2f} s."
    )
    print_outcome(console, report)
    print_engines(console, report.engines)
