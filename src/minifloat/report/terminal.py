"""Documents on a terminal: tables without rules, sentences that the terminal wraps, and no headings."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from minifloat.report import document as doc
from minifloat.report.text import visible

_MIN_FOLDED = 9  #: characters of a column that folds
_PIPE_COLUMNS = 160


def make_console() -> Console:
    """Return a console on standard output. A pipe gets 160 columns, so that no row is cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_COLUMNS)


def write(document: doc.Document, console: Console | None = None) -> None:
    _Printer(console or make_console()).print_blocks(document.blocks)


class _Printer:
    """Prints blocks; a table, and a section, has an empty line around it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._gap = False  # whether an empty line comes before what is printed next
        self._started = False

    def print_blocks(self, blocks: Iterable[doc.Block]) -> None:
        for block in doc.shown(blocks, doc.On.TERMINAL):
            match block:
                case doc.Section():
                    self._gap = True
                    self.print_blocks(block.blocks)
                    self._gap = True
                case doc.Folded():
                    self.print_blocks(block.blocks)
                case doc.Text():
                    self._line(block.text, {"strong": "bold", "soft": "dim"}.get(block.tone, ""))
                case doc.Bullets():
                    for item in block.items:
                        self._line(item)
                case doc.Facts():
                    width = max((len(name) for name, _ in block.pairs), default=0)
                    for name, value in block.pairs:
                        self._line(f"{name:<{width}}  {value}")
                case doc.Alert():
                    self._line(block.title)
                    for reason in block.reasons:
                        self._line(f"  {reason}")
                case doc.Code():
                    for line in block.text.splitlines():
                        self._line(f"    {line}")
                case doc.Passage():
                    self._line(f"{block.text}{block.marked}")
                case doc.Table():
                    self._table(block)
                case doc.Figure():
                    pass

    def _line(self, text: str, style: str = "") -> None:
        if self._gap and self._started:
            self._console.print()
        self._gap, self._started = False, True
        self._console.print(RichText(visible(text), style), soft_wrap=True)

    def _table(self, block: doc.Table) -> None:
        self._gap = True
        if block.title:
            self._line(block.title)
        elif self._started:
            self._console.print()
        columns, rows = block.shown(doc.On.TERMINAL)
        table = RichTable(box=None, pad_edge=False, header_style="bold", show_header=any(c.name for c in columns))
        for column in columns:
            table.add_column(
                RichText(visible(column.name)),
                justify="left" if column.left else "right",
                no_wrap=not column.folds,
                overflow="fold" if column.folds else "ellipsis",
                min_width=_MIN_FOLDED if column.folds else None,
            )
        for row in rows:
            table.add_row(*(RichText(visible(str(cell))) for cell in row))
        self._console.print(table)
        self._gap = self._started = True
