"""The charts of a page, as SVG that matplotlib draws: equal data gives equal bytes.

Series differ in dashes and markers as well as in colour. Colours become CSS variables with a fallback, so that a page
can choose them for its background.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from minifloat.report.document import Axis, Bars, Dot, Dots, Figure, Heatmap, Lines, Mark, Point, Scatter
from minifloat.report.text import COLORS, escape, format_number, visible

_WIDTH, _PLOT_HEIGHT, _ROW = 7.6, 2.9, 0.25  #: inches; of a chart, of an area of lines, of a row of text
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = "osD^"
_INK, _INK_HEX = "#010203", "#010203"  #: stands for the colour of the page's text
_MOST_MARKED = 60  #: points of a line whose points are marked
_MOST_CHARACTERS = 48
_SHADES = 8  #: shades of a heatmap
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.16,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(figure: Figure, *, alone: bool = False) -> str:
    """Return the chart of a figure as an ``<svg>`` element; `alone` makes it a file of its own."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": figure.caption}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas = Canvas(figsize=(_WIDTH, _PLOT_HEIGHT))
        axes = canvas.add_subplot()
        match figure.chart:
            case Lines():
                _lines(canvas, axes, figure.chart)
            case Bars():
                _bars(canvas, axes, figure.chart)
            case Dots():
                _dots(canvas, axes, figure.chart)
            case Scatter():
                _scatter(axes, figure.chart)
            case Heatmap():
                _heatmap(canvas, axes, figure.chart)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _cleaned(file.getvalue(), figure.caption, alone=alone)


def _cleaned(text: str, title: str, *, alone: bool) -> str:
    """Return the SVG without its head and unused ids, with CSS colours and a title that is read aloud."""
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    svg = svg.replace(_INK_HEX, "currentColor")
    for index, color in enumerate(COLORS, 1):
        svg = svg.replace(color, f"var(--series-{index},{color})")
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    assert size is not None  # matplotlib writes both
    svg = svg.replace(size[0], f'width="{float(size[1]):g}pt" height="{float(size[2]):g}pt"', 1)
    style = "<style>svg{color:#1c2128;background:#fff}</style>" if alone else ""
    head, bracket, rest = svg.partition(">")
    return f'{head} role="img" aria-label="{escape(title)}"{bracket}{style}{rest}'


def _tick_text(axis: Axis, value: float) -> str:
    return f"{format_number(100 * value)}%" if axis.percent else format_number(value)


def _set_axis(axes: Axes, which: str, axis: Axis) -> None:
    """Apply label, scale, range and ticks of an axis, ``"x"`` or ``"y"``."""
    axes.set(**{f"{which}label": visible(axis.label)})
    side = axes.xaxis if which == "x" else axes.yaxis
    if axis.log and math.isfinite(side.get_minpos()):  # else there is no value to draw
        axes.set(**{f"{which}scale": "log"})
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    if axis.low is not None or axis.high is not None:
        room = 0.02 * (high - low)
        limits = (low if axis.low is None else axis.low, high if axis.high is None else axis.high + room)
        axes.set(**{f"{which}lim": limits})
    decades = math.log10(high / low) if side.get_scale() == "log" else 0.0
    if axis.at:
        side.set_major_locator(FixedLocator(axis.at))
        side.set_minor_locator(NullLocator())
    elif side.get_scale() != "log":
        side.set_major_locator(MaxNLocator(6, integer=axis.whole))
    elif 1.0 < decades < 2.5:
        side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter(FuncFormatter(lambda value, _: _tick_text(axis, float(f"{value:.12g}"))))
    if 0.0 < decades <= 1.0 and not axis.at:
        side.set_minor_formatter(FuncFormatter(lambda value, _: _tick_text(axis, float(f"{value:.12g}"))))
    else:
        side.set_minor_formatter(NullFormatter())


def _drawable(value: float, axis: Axis) -> float:
    """Return the value, or NaN where the axis has no place for it."""
    return value if math.isfinite(value) and (value > 0 or not axis.log) else math.nan


def _short(text: str) -> str:
    """Return a text without its middle if it is long: names differ at both ends."""
    shown = visible(text)
    if len(shown) <= _MOST_CHARACTERS:
        return shown
    half = _MOST_CHARACTERS // 2
    return f"{shown[: half - 1]}…{shown[-half:]}"


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _mark(axes: Axes, mark: Mark | None, level: int = 0) -> None:
    """Draw a dashed vertical line with its text above the chart."""
    if mark is not None:
        axes.axvline(mark[0], color=_INK, linewidth=0.9, dashes=(4, 3))
        place = (mark[0], 1.0)
        axes.annotate(
            visible(mark[1]), place, (0, 3 + 11 * level), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", annotation_clip=False,
        )  # fmt: skip


def _lines(canvas: Canvas, axes: Axes, chart: Lines) -> None:
    marked = chart.markers and all(len(series.points) <= _MOST_MARKED for series in chart.series)
    for index, series in enumerate(chart.series):
        color, dash = _color(index), _DASHES[index % len(_DASHES)]
        band = [(x, _drawable(low, chart.y), _drawable(high, chart.y)) for x, low, high in series.band]
        if band:
            xs, lows, highs = (list(part) for part in zip(*band, strict=True))
            axes.fill_between(xs, lows, highs, color=color, alpha=0.16, linewidth=0)
        xs = [_drawable(x, chart.x) for x, _ in series.points]
        ys = [_drawable(y, chart.y) for _, y in series.points]
        alone = sum(math.isfinite(y) for y in ys) == 1
        axes.plot(
            xs, ys, color=color, linestyle=dash, label=_short(series.name),
            marker=_MARKERS[index % len(_MARKERS)] if marked or alone else "",
            markerfacecolor=color if index % 8 < len(_MARKERS) else "none",
        )  # fmt: skip
    for level, mark in enumerate(chart.marks):
        _mark(axes, mark, level)
    _set_axis(axes, "x", chart.x)
    _set_axis(axes, "y", chart.y)
    _legend(canvas, axes, len(chart.series))


def _legend(canvas: Canvas, axes: Axes, count: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    across = 2 if max(map(len, labels), default=0) > 24 else 3
    canvas.set_figheight(canvas.get_figheight() + 0.2 * math.ceil(count / across))
    canvas.legend(handles, labels, loc="outside lower left", ncols=across)


def _rows(canvas: Canvas, axes: Axes, names: Sequence[str], rows: int) -> None:
    """Make a chart of rows that are read downward, with their names at the left."""
    canvas.set_figheight(_ROW * rows + 0.9)
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _row_texts(axes: Axes, texts: Sequence[tuple[float, str]]) -> None:
    for y, text in texts:
        axes.annotate(
            visible(text), (1.0, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", annotation_clip=False,
        )  # fmt: skip


def _bars(canvas: Canvas, axes: Axes, chart: Bars) -> None:
    _rows(canvas, axes, [bar.label for bar in chart.bars], len(chart.bars))
    values = [bar.value if math.isfinite(bar.value) else 0.0 for bar in chart.bars]
    axes.barh(range(len(values)), values, height=0.7, color=_color(0))
    _row_texts(axes, [(float(row), bar.text) for row, bar in enumerate(chart.bars)])
    _mark(axes, chart.mark)
    _set_axis(axes, "x", chart.axis)


def _dots(canvas: Canvas, axes: Axes, chart: Dots) -> None:
    most = max((len(dots) for _, dots in chart.rows), default=1)
    _rows(canvas, axes, [name for name, _ in chart.rows], len(chart.rows) * most)
    for index in range(most):
        found: list[tuple[float, Dot]] = [
            (row + (index - (most - 1) / 2) * 0.8 / most, dots[index])
            for row, (_, dots) in enumerate(chart.rows)
            if index < len(dots)
        ]
        name = chart.names[index] if index < len(chart.names) else ""
        for y, dot in found:
            if math.isfinite(dot.low) and math.isfinite(dot.high):
                axes.plot([dot.low, dot.high], [y, y], color=_color(index), marker="|")
        axes.plot(
            [dot.value for _, dot in found], [y for y, _ in found], color=_color(index), linestyle="none",
            marker=_MARKERS[index % len(_MARKERS)], label=_short(name),
            markerfacecolor=_color(index) if index % 8 < len(_MARKERS) else "none",
        )  # fmt: skip
        _row_texts(axes, [(y, dot.text) for y, dot in found])
    _mark(axes, chart.mark)
    _set_axis(axes, "x", chart.axis)
    if most > 1:
        _legend(canvas, axes, most)


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points for which no other has at most the same x and at most the same y, by ascending x."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def _scatter(axes: Axes, chart: Scatter) -> None:
    front = pareto_front(chart.points)
    if len(front) > 1:
        axes.plot(
            [point.x for point in front], [point.y for point in front],
            color=_color(0), linestyle=":", drawstyle="steps-post", alpha=0.6,
        )  # fmt: skip
    for point in chart.points:
        if math.isfinite(_drawable(point.low, chart.y)) and math.isfinite(point.high):
            axes.plot([point.x, point.x], [point.low, point.high], color=_color(0), marker="_")
        axes.plot([point.x], [point.y], color=_color(0), marker="o")
    for rank, point in enumerate(sorted(chart.points, key=lambda point: (point.x, point.y))):
        right = rank % 2 == 0
        axes.annotate(
            _short(point.name), (point.x, point.y), (6 if right else -6, 5), textcoords="offset points",
            ha="left" if right else "right", annotation_clip=False,
        )  # fmt: skip
    if chart.mark is not None:
        axes.axhline(chart.mark[0], color=_INK, linewidth=0.9, dashes=(4, 3))
        axes.annotate(
            visible(chart.mark[1]), (1.0, chart.mark[0]), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right",
        )  # fmt: skip
    axes.margins(x=0.15, y=0.1)
    _set_axis(axes, "x", chart.x)
    _set_axis(axes, "y", chart.y)


def _heatmap(canvas: Canvas, axes: Axes, chart: Heatmap) -> None:
    """Draw cells of equal shades that touch as one rectangle."""
    _rows(canvas, axes, [name for name, _ in chart.rows], len(chart.rows))
    length = max(len(values) for _, values in chart.rows)
    for row, (_, values) in enumerate(chart.rows):
        shades = [_shade(value, chart) for value in values]
        starts = [0, *(i for i in range(1, len(shades)) if shades[i] != shades[i - 1]), len(shades)]
        for start, end in itertools.pairwise(starts):
            axes.barh(
                row, end - start, left=start, height=1.0, color=_color(0), linewidth=0,
                alpha=(shades[start] + 1) / _SHADES,
            )  # fmt: skip
    axes.set_xlim(0, length)
    axes.set_xticks([])
    unit = f"{_SHADES} shades from {format_number(chart.low)} to {format_number(chart.high)} {visible(chart.unit)}"
    axes.set_xlabel(f"{visible(chart.columns)}; {unit}, darker is larger")


def _shade(value: float, chart: Heatmap) -> int:
    """Return the shade of a value, 0 .. `_SHADES` - 1."""
    if not math.isfinite(value) or value <= chart.low:
        return 0
    return min(int(math.log(value / chart.low) / math.log(chart.high / chart.low) * _SHADES), _SHADES - 1)
