"""What a result says, once: sections of sentences, tables and figures, which `terminal`, `html` and `markdown` write.

Texts are plain: each writer escapes them. Numbers enter as text (`report.text`). A block says where it appears.
"""

from __future__ import annotations

import enum
import html
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class On(enum.Flag):
    """The outputs that a block appears in."""

    TERMINAL = enum.auto()
    PAGE = enum.auto()
    CARD = enum.auto()
    ALL = TERMINAL | PAGE | CARD


@dataclass(frozen=True, kw_only=True)
class Block:
    on: On = On.ALL


class Pair(NamedTuple):
    """A cell with a second part, such as a value and its interval; the page puts it on a line of its own."""

    value: str
    below: str

    def __str__(self) -> str:
        return f"{self.value} {self.below}" if self.below else self.value


Cell = str | Pair


class Column(NamedTuple):
    """A column of a table; `folds`: a narrow terminal breaks its texts into lines."""

    name: str
    left: bool = False
    folds: bool = False
    on: On = On.ALL


@dataclass(frozen=True)
class Text(Block):
    """A paragraph; its tone is ``""``, ``"strong"`` or ``"soft"``."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets(Block):
    items: Sequence[str]


@dataclass(frozen=True)
class Facts(Block):
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table(Block):
    """Rows of cells; a row of one cell is a heading of the rows after it. Numbers stand at the right of a column."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""

    def shown(self, on: On) -> tuple[list[Column], list[list[Cell]]]:
        """Return the columns and cells that appear in an output."""
        kept = [index for index, column in enumerate(self.columns) if column.on & on]
        rows = [list(row) if len(row) == 1 else [row[index] for index in kept] for row in self.rows]
        return [self.columns[index] for index in kept], rows


@dataclass(frozen=True)
class Alert(Block):
    """A message that must not be overlooked, with its reasons: ``passed``, ``failed``, ``undecided``, ``warning``."""

    kind: str
    title: str
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Code(Block):
    text: str
    language: str = ""


@dataclass(frozen=True)
class Passage(Block):
    """Text of a corpus or of a model, with a marked end."""

    text: str
    marked: str = ""


@dataclass(frozen=True)
class Folded(Block):
    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section(Block):
    """A heading and its blocks; a section inside another one has a smaller heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    title: str
    blocks: Sequence[Block]


def columns(*names: str | Column, folds: bool = False) -> list[Column]:
    """Return columns of numbers after a first column of names."""
    first, *others = names
    head = first if isinstance(first, Column) else Column(first, left=True, folds=folds)
    return [head, *(name if isinstance(name, Column) else Column(name) for name in others)]


def section(title: str, *blocks: Block | None, on: On = On.ALL) -> Section:
    """Return a section of the blocks that are not None."""
    return Section(title, tuple(block for block in blocks if block is not None), on=on)


def shown(blocks: Iterable[Block], on: On) -> Iterator[Block]:
    """Yield the blocks that appear in an output, without sections and lists that have nothing to show there."""
    for block in blocks:
        if not block.on & on:
            continue
        if isinstance(block, Section | Folded) and not any(shown(block.blocks, on)):
            continue
        if (isinstance(block, Bullets) and not block.items) or (isinstance(block, Text) and not block.text):
            continue
        yield block


@dataclass(frozen=True)
class Axis:
    """One axis of a chart; `low` and `high` None: from the data. `at`: its only ticks."""

    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False
    percent: bool = False
    at: tuple[float, ...] = ()


class Series(NamedTuple):
    """A line, and the shaded area ``(x, low, high)`` around it; a line is interrupted where a value is not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float, float]] = ()


class Bar(NamedTuple):
    label: str
    value: float
    text: str


class Dot(NamedTuple):
    """A value, the text at the end of its row, and the ends of its interval (NaN: no interval)."""

    value: float
    text: str = ""
    low: float = math.nan
    high: float = math.nan


class Point(NamedTuple):
    """A named point, and the ends of the interval of its y (NaN: no interval)."""

    name: str
    x: float
    y: float
    low: float = math.nan
    high: float = math.nan


#: A value at which a chart has a dashed line, and the text beside it.
Mark = tuple[float, str]


@dataclass(frozen=True)
class Lines:
    series: Sequence[Series]
    x: Axis
    y: Axis
    markers: bool = True
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Bars:
    bars: Sequence[Bar]
    axis: Axis
    mark: Mark | None = None


@dataclass(frozen=True)
class Dots:
    """Values with intervals: one row per label, one dot per series."""

    rows: Sequence[tuple[str, Sequence[Dot]]]
    names: Sequence[str]
    axis: Axis
    mark: Mark | None = None


@dataclass(frozen=True)
class Scatter:
    """Named points, less is better on both axes; a dotted line joins those that no other point beats on both."""

    points: Sequence[Point]
    x: Axis
    y: Axis
    mark: Mark | None = None


@dataclass(frozen=True)
class Heatmap:
    """A row per name, darker where a value is larger, in steps from `low` to `high` on a log scale."""

    rows: Sequence[tuple[str, Sequence[float]]]
    low: float
    high: float
    unit: str
    columns: str


@dataclass(frozen=True)
class Figure(Block):
    """A chart with its caption; a card shows those that are a file beside the weights, given by its name."""

    caption: str
    chart: Lines | Bars | Dots | Scatter | Heatmap | str
    on: On = field(default=On.PAGE, kw_only=True)


class ShortReport(ABC):
    """Base of the results of public functions, for notebooks and Python's prompt.

    Their dataclasses leave `repr` to it (``repr=False``).
    """

    @abstractmethod
    def headline(self) -> dict[str, str]:
        """Return what a reader wants to know first, by its name: at most eight short texts."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {text}' for name, text in self.headline().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for name, text in self.headline().items()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"
