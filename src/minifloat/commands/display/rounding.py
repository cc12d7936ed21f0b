"""Prints how `quantize` chose codes with data. No computation here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from minifloat.commands.display.console import make_table
from minifloat.quantize.rounding_summary import summary_rows


def print_rounding(console: Console, rounding: Mapping[str, Any], *, verbose: bool) -> None:
    """Print the method, the text, the gain on held-out text and the exceptions; with `verbose` a row per weight."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for label, text in summary_rows(rounding):
        table.add_row(label, text)
    console.print(table)
    if verbose:
        console.print()
        console.print(_weight_table(rounding))


def _weight_table(rounding: Mapping[str, Any]) -> Table:
    """Return a table of the relative squared errors of outputs on held-out text."""
    numbers = ("tokens", "error nearest", "error method", "drift", "damping")
    table = make_table("weight", "codes by", *numbers, right=numbers)
    for row in rounding["weights"]:
        table.add_row(
            row["module"],
            row["method"],
            f"{row['tokens']:,}" if "tokens" in row else "",
            *(_figure(row, key, "{:.3e}") for key in ("nearest_error", "method_error")),
            _figure(row, "drift_factor", "{:.2f}"),
            _figure(row, "damping", "{:.3g}"),
        )
    return table


def _figure(row: Mapping[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) if row.get(key) is not None else ""
