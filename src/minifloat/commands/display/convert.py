"""How the report of `convert` looks on a terminal. No computation here."""

from __future__ import annotations

from minifloat.commands.display.console import make_console, make_table
from minifloat.convert.report import ConvertedTensor, ConvertReport
from minifloat.report.text import layer_pattern, size_text


def print_convert_report(report: ConvertReport, *, verbose: bool) -> None:
    """Every tensor is in a row; unless `verbose`, the same tensor of all layers shares one."""
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
    if report.resumed_shards:
        console.print(f"{report.resumed_shards} shards were taken over from an interrupted run.")
    for note in report.notes:
        console.print(f"Note: {note}")
    console.print(f"Written to {report.destination}")
