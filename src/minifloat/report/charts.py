"""Line, bar and dot charts as SVG text, and meters for table cells: any browser shows them without a script.

Series differ in dashes and markers as well as in colour, so colour is never needed to read a chart. Text keeps its
size: a chart is drawn for a width in pixels, once per width that a page needs. Not supported: interaction, time axes,
stacked and grouped bars.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.report.axes import Axis, PixelMapping, format_number
from minifloat.report.svg import (
    FONT_SIZE,
    PAD,
    ROW,
    Point,
    area,
    empty,
    horizontal_bar,
    interval_dot,
    label,
    legend,
    polyline,
    px,
    reference_line,
    rule,
    series_color,
    shorten,
    svg,
    text_width,
    vertical_mark,
    x_axis,
    y_axis,
)

_NARROW = 480  #: pixels of a chart; below this width the labels of bars and dots are above them


@dataclass(frozen=True)
class Series:
    """One line of a line chart."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its value, and the text at its end (None: the value)."""

    label: str
    value: float
    text: str | None = None


@dataclass(frozen=True)
class Dot:
    """One dot: its value, the text at the right of its row, and the ends of its interval (NaN: no interval)."""

    value: float
    text: str
    low: float = math.nan
    high: float = math.nan


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    width: int = 720,
    plot_height: int = 240,
    markers: bool = True,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a chart of lines over a common x, with a legend below."""
    lines = [[_drawable(point, x, y) for point in entry.points] for entry in series]
    bands = [[edge for edge in entry.band if _band_is_drawable(edge, x, y)] for entry in series]
    drawn = [point for line in lines for point in line if point]
    drawn += [(position, end) for band in bands for position, *ends in band for end in ends]
    if not drawn:
        return empty(title, width)
    top = ROW * (1 + len(marks)) + PAD
    bottom = top + plot_height
    vertical = PixelMapping.fit(y, [point[1] for point in drawn], bottom, top, rounded=True)
    left = max(text_width(y.text(tick)) for tick in vertical.ticks) + 10
    across = [point[0] for point in drawn] + [value for value, _ in marks]
    horizontal = PixelMapping.fit(x, across, left + 6, width - 2 * PAD)
    parts = [label(0, FONT_SIZE, y.label), *y_axis(vertical, left, width - PAD), *x_axis(horizontal, top, bottom)]
    for index, (value, text) in enumerate(marks):
        parts += vertical_mark(horizontal(value), ROW * (index + 1), bottom, text, (left + width) / 2)
    marked = markers and max(map(len, lines)) <= (width - left) / 9
    for index, (line, band) in enumerate(zip(lines, bands, strict=True)):
        parts += area(index, band, horizontal, vertical)
        parts += polyline(index, series[index].name, line, horizontal, vertical, marked)
    entries, height = legend([entry.name for entry in series], bottom + 2 * ROW + PAD, width, marked)
    return svg(title, width, height, [*parts, *entries])


def bar_chart(
    bars: Sequence[Bar], *, title: str, axis: Axis, mark: tuple[float, str] | None = None, width: int = 720
) -> str:
    """Return a chart of horizontal bars from 0, one below the other, each with its label and value."""
    if not bars:
        return empty(title, width)
    texts = [format_number(bar.value) if bar.text is None else bar.text for bar in bars]
    above = width < _NARROW
    left = 0.0 if above else min(max(text_width(bar.label) for bar in bars) + PAD, width * 0.5)
    right = width - max(map(text_width, texts)) - 2 * PAD
    values = [bar.value for bar in bars if math.isfinite(bar.value)] + ([mark[0]] if mark else [])
    horizontal = PixelMapping.fit(Axis(low=0.0, high=axis.high), values or [1.0], left, right)
    row_height = 2 * ROW if above else ROW + 4
    top = ROW + PAD if mark else 0
    bottom = top + row_height * len(bars)
    parts = [] if above else [rule(left, top, left, bottom, opacity=0.6)]
    for index, (bar, text) in enumerate(zip(bars, texts, strict=True)):
        base = top + row_height * index + (ROW if above else 0)
        length = max(horizontal(bar.value) - left, 0.0) if math.isfinite(bar.value) else 0.0
        name = shorten(bar.label, width if above else left - PAD)
        parts.append(label(0, base - 4 if above else base + 14, name, hint=bar.label))
        parts.append(horizontal_bar(left, base, length))
        parts.append(label(left + length + 4, base + 14, text))
    if mark:
        parts += reference_line(horizontal(mark[0]), bottom, mark[1], width)
    parts.append(label(left, bottom + FONT_SIZE + 4, axis.label))
    return svg(title, width, bottom + ROW + 4, parts)


def dot_chart(
    rows: Sequence[tuple[str, Sequence[Dot]]],
    names: Sequence[str],
    *,
    title: str,
    axis: Axis,
    mark: tuple[float, str] | None = None,
    width: int = 720,
) -> str:
    """Return a chart of values with their intervals on a common axis: one row per label, with one line per series."""
    dots = [dot for _, row in rows for dot in row]
    values = [value for dot in dots for value in (dot.value, dot.low, dot.high) if math.isfinite(value)]
    if not values:
        return empty(title, width)
    above = width < _NARROW
    left = 2.0 * PAD if above else min(max(text_width(name) for name, _ in rows) + PAD, width * 0.4)
    right = width - max(text_width(dot.text) for dot in dots) - 2 * PAD
    horizontal = PixelMapping.fit(axis, values + ([mark[0]] if mark else []), left + 6, right - PAD, rounded=True)
    parts: list[str] = []
    top = ROW + PAD if mark else 0
    y = float(top)
    for name, row in rows:
        parts.append(rule(0, y, width, y))
        parts.append(label(0, y + 14, shorten(name, width if above else left - PAD), hint=name))
        y += ROW if above else 0
        for index, dot in enumerate(row):
            parts += interval_dot(index, dot.value, dot.low, dot.high, horizontal, y + ROW / 2)
            parts.append(label(width, y + 14, dot.text, "end"))
            y += ROW
        y += 4
    axes = x_axis(horizontal, top, y)
    if mark:
        axes += reference_line(horizontal(mark[0]), y, mark[1], width)
    y += 2 * ROW + PAD
    if len(names) > 1:
        entries, y = legend(names, y, width, True)
        parts += entries
    return svg(title, width, y + PAD, [*axes, *parts])


def meter(fraction: float, width: int = 60) -> str:
    """Return a small bar for a table cell; screen readers skip it, because the cell also shows the number."""
    filled = width * min(max(fraction, 0.0), 1.0) if math.isfinite(fraction) else 0.0
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="10" viewBox="0 0 {width} 10" '
        f'aria-hidden="true"><rect width="{width}" height="10" style="fill:currentColor" opacity="0.12"/>'
        f'<rect width="{px(filled)}" height="10" style="fill:{series_color(0)}"/></svg>'
    )


def _drawable(point: Point, x: Axis, y: Axis) -> Point | None:
    """Return the point, or None if it is a gap."""
    shown = all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in zip(point, (x, y), strict=True))
    return point if shown else None


def _band_is_drawable(edge: tuple[float, float, float], x: Axis, y: Axis) -> bool:
    return all(_drawable((edge[0], end), x, y) is not None for end in edge[1:])
