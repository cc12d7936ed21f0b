"""Prints the report of `push`."""

from __future__ import annotations

from rich.markup import escape

from minifloat.commands.display.console import make_console, make_table
from minifloat.deploy.publish import PushReport
from minifloat.report.text import size_text


def print_push(report: PushReport) -> None:
    """Print the files that were, or would be, uploaded, and the address."""
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
