"""Prints the inspection of a checkpoint. No computation here."""

from __future__ import annotations

import math
from typing import Any

from minifloat.commands.display.console import make_console, make_table, shape_text
from minifloat.model.layouts.inspection import Inspection
from minifloat.report.text import layer_pattern, size_text


def print_inspection(inspection: Inspection, *, verbose: bool) -> None:
    """Print the architecture and layout, the bytes by kind and by format, then the tensors."""
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
        numbers = ("tensors", "weights", "bytes", "share")
        table = make_table(attribute, *numbers, right=numbers)
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
    for (name, kind, element_format), rows in groups.items():
        size = size_text(sum(row.nbytes for row in rows))
        table.add_row(name, str(len(rows)), shape_text({row.shape for row in rows}), kind, element_format, size)
    console.print(table)
    if inspection.ignored_files:
        console.print(f"\nNot named by the index, ignored: {', '.join(inspection.ignored_files)}")
