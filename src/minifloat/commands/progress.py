"""What commands print on standard error while they work: the progress bar, and sentences before anything is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from rich.text import Text

from minifloat.report.text import size_text

if TYPE_CHECKING:
    from minifloat.checkpoint.progress import Progress as ProgressCallback


class RateColumn(ProgressColumn):
    """How fast the work goes: bytes per second where the work is bytes, else its share per second or minute."""

    def __init__(self, *, in_bytes: bool) -> None:
        super().__init__()
        self._in_bytes = in_bytes

    def render(self, task: Task) -> Text:
        if not task.speed or not task.total:
            return Text("")
        if self._in_bytes:
            return Text(f"{size_text(task.speed)}/s")
        share = 100 * task.speed / task.total
        return Text(f"{share:.1f}%/s" if share >= 1 else f"{share * 60:.1f}%/min")


@contextlib.contextmanager
def progress_bar(enabled: bool, *, in_bytes: bool = False) -> Iterator[ProgressCallback | None]:
    """Show a progress bar on standard error during the block: bar, share, rate, time, time left, what is done."""
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


def announce(sentence: str) -> None:
    """Print a sentence on standard error before a command writes anything."""
    Console(stderr=True, highlight=False).print(f"Note: {sentence}", soft_wrap=True, markup=False)
