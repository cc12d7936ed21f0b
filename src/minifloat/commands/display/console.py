"""Tables of the reports that are still printed one by one."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from minifloat.report.terminal import make_console

__all__ = ["make_console", "make_table"]


def make_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """Return a table without rules whose cells never wrap; the columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table
