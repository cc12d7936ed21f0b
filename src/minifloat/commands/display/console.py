"""Parts that the reports of several commands share: the console, tables, the progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from minifloat.report.text import size_text

if TYPE_CHECKING:
    from minifloat.checkpoint.progress import Progress as ProgressCallback
    from minifloat.deploy.check.engine_verdict import EngineVerdict
    from minifloat.quantize.convert.report import ConvertReport
    from minifloat.quantize.report import QuantizeReport


def make_console() -> Console:
    """Return a console on standard output. A pipe gets 160 columns, so that no row is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


class RateColumn(ProgressColumn):
    """How fast the work goes: bytes per second where the work is bytes, else its share per second or minute."""

    def __init__(self, *, in_bytes: bool) -> None:
        super().__init__()
        self._in_bytes = in_bytes

    def render(self, task: Task) -> Text:
        """Return the rate of a task; nothing while it is not known."""
        if not task.speed or not task.total:
            return Text("")
        if self._in_bytes:
            return Text(f"{size_text(task.speed)}/s")
        share = 100 * task.speed / task.total
        return Text(f"{share:.1f}%/s" if share >= 1 else f"{share * 60:.1f}%/min")


@contextlib.contextmanager
def progress_bar(enabled: bool, *, in_bytes: bool = False) -> Iterator[ProgressCallback | None]:
    """Show a progress bar on standard error during the block: bar, share, rate, time, time left, what is done.

    rich leaves colors out where NO_COLOR is set.
    """
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield None
        return
    columns = (
        BarColumn(),
        TaskProgressColumn(),
        RateColumn(in_bytes=in_bytes),
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
    """Return a table without rules whose cells never wrap; the columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def shape_text(shapes: set[tuple[int, ...]]) -> str:
    """Return the shape that a group of tensors shares, such as ``64x128``, or "various"."""
    return "x".join(map(str, next(iter(shapes)))) if len(shapes) == 1 else "various"


def print_outcome(console: Console, report: QuantizeReport | ConvertReport) -> None:
    """Print the resumed shards, the notes and the destination of a checkpoint that was written."""
    if report.resumed_shards:
        console.print(f"{report.resumed_shards} shards were taken over from an interrupted run.")
    for note in report.notes:
        console.print(f"Note: {note}")
    console.print(f"Written to {report.destination}")


def print_engines(console: Console, verdicts: Iterable[EngineVerdict]) -> None:
    """Print for each engine on which machines it loads the checkpoint, and below it the first reason against it."""
    console.print("\nEngines that load it, by the rules of minifloat check:")
    for verdict in verdicts:
        console.print(f"  {verdict}", soft_wrap=True, markup=False)
        if verdict.problem:
            cure = f"; cure: {verdict.cure}" if verdict.cure else ""
            console.print(f"    {verdict.problem}{cure}", soft_wrap=True, markup=False, style="dim")


def announce(sentence: str) -> None:
    """Print a sentence on standard error before a command writes anything."""
    Console(stderr=True, highlight=False).print(f"Note: {sentence}", soft_wrap=True, markup=False)
