"""Charts as SVG text, so that a report is one file that any browser shows and prints without a script.

Pure functions of numbers: no clock, no randomness, no request, so equal input gives equal bytes. Colours are CSS
variables (``--series-1`` ...) with a fallback, which lets a page choose them for light and dark and lets a chart stand
alone; series also differ in dashes and markers, so that colour is never needed. Text keeps its size: a chart is drawn
for a width in pixels, once per width that a page needs. Left out: interaction, time axes, stacked and grouped bars.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minifloat.report.axes import Axis, Mapping, format_number

#: Where a line goes: x and y. A point that is not finite, or not above 0 on a log axis, is a gap in the line.
Point: TypeAlias = tuple[float, float]

#: Fallback colours of the series, for light and, with less contrast, dark backgrounds.
COLORS = ("#1f6fb4", "#b8520a", "#1a7f4b", "#8250df", "#b3305c", "#0e7c86", "#7a5c1e", "#59636e")

_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2 1 2")
_FONT = 12
_CHARACTER = 6.4  #: average advance of a character in pixels at that size
_PERCENT = 0.8  #: by how many of those a percent sign is wider
_ROW = 18
_PAD = 8
_SWATCH = 30
_NARROW = 480  #: below this width the labels of bars stand above them
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: For the legend.
        points: In the order of x.
        band: ``(x, low, high)`` of an area that is shaded behind the line.
    """

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Bar:
    """One bar: its length, and the text at its end (None: the number)."""

    label: str
    value: float
    text: str | None = None


@dataclass(frozen=True)
class Dot:
    """A value, the ends of its interval (NaN: there is none), and the text at the right of its row."""

    value: float
    text: str
    low: float = math.nan
    high: float = math.nan


def escape(text: object) -> str:
    """Text for SVG and HTML: markup escaped, and what XML cannot hold replaced."""
    return html.escape(_INVALID.sub("\ufffd", str(text)))


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    width: int = 720,
    plot_height: int = 240,
    markers: bool = True,
) -> str:
    """Lines over a common x, with a legend below.

    Args:
        series: At most as many as there are `COLORS` are told apart for certain.
        title: What the chart shows, in words, for who cannot see it.
        x: Horizontal axis; fits the data.
        y: Vertical axis; its label stands above it.
        width: Pixels of the whole chart.
        plot_height: Pixels between the axes' ends; labels and legend come on top.
        markers: Mark every point, if there is room; points that stand alone always are.

    Returns:
        An ``<svg>`` element. Without a point that can be drawn it says so.
    """
    kept = [[_drawable(point, x, y) for point in one.points] for one in series]
    areas = [[entry for entry in one.band if _in_band(entry, x, y)] for one in series]
    found = [point for points in kept for point in points if point] + [
        (entry[0], edge) for area in areas for entry in area for edge in entry[1:]
    ]
    if not found:
        return _empty(title, width)
    top, bottom = _ROW + _PAD, _ROW + _PAD + plot_height
    vertical = Mapping.fit(y, [point[1] for point in found], bottom, top, rounded=True)
    left = max(_text_width(y.text(tick)) for tick in vertical.ticks) + 10
    horizontal = Mapping.fit(x, [point[0] for point in found], left + 6, width - 2 * _PAD)
    parts = [_text(0, _FONT, y.label), *_grid(vertical, left, width - _PAD), *_x_axis(horizontal, top, bottom)]
    marked = markers and max(map(len, kept)) <= (width - left) / 9
    for index, (points, area) in enumerate(zip(kept, areas, strict=True)):
        parts += _area(index, area, horizontal, vertical)
        parts += _line(index, series[index].name, points, horizontal, vertical, marked)
    legend, height = _legend([one.name for one in series], bottom + 2 * _ROW + _PAD, width, marked)
    return _svg(title, width, height, [*parts, *legend])


def bar_chart(
    bars: Sequence[Bar], *, title: str, axis: Axis, mark: tuple[float, str] | None = None, width: int = 720
) -> str:
    """Horizontal bars from 0, one below the other, each with its label and value.

    Args:
        bars: From top to bottom; a value that is not finite, or below 0, has no bar.
        title: What the chart shows, in words, for who cannot see it.
        axis: Of the values; linear.
        mark: A value to compare with, drawn as a dashed line, and what it is.
        width: Pixels of the whole chart.

    Returns:
        An ``<svg>`` element.
    """
    if not bars:
        return _empty(title, width)
    texts = [format_number(bar.value) if bar.text is None else bar.text for bar in bars]
    above = width < _NARROW
    left = 0.0 if above else min(max(_text_width(bar.label) for bar in bars) + _PAD, width * 0.5)
    right = width - max(map(_text_width, texts)) - 2 * _PAD
    values = [bar.value for bar in bars if math.isfinite(bar.value)] + ([mark[0]] if mark else [])
    horizontal = Mapping.fit(Axis(low=0.0, high=axis.high), values or [1.0], left, right)
    row = 2 * _ROW if above else _ROW + 4
    top = _ROW + _PAD if mark else 0
    bottom = top + row * len(bars)
    parts = [] if above else [_rule(left, top, left, bottom, opacity=0.6)]
    for index, (bar, text) in enumerate(zip(bars, texts, strict=True)):
        base = top + row * index + (_ROW if above else 0)
        length = max(horizontal(bar.value) - left, 0.0) if math.isfinite(bar.value) else 0.0
        label = _shorten(bar.label, width if above else left - _PAD)
        parts.append(_text(0, base - 4 if above else base + 14, label, hint=bar.label))
        parts.append(
            f'<rect x="{_px(left)}" y="{_px(base + 3)}" width="{_px(length)}" height="{_ROW - 4}" '
            f'style="fill:{_color(0)}"/>'
        )
        parts.append(_text(left + length + 4, base + 14, text))
    if mark:
        at = horizontal(mark[0])
        parts.append(_rule(at, _ROW, at, bottom, 'stroke-dasharray="4 3"', opacity=0.8))
        end = at > width / 2
        parts.append(_text(at, _FONT, mark[1], "end" if end else "start"))
    parts.append(_text(left, bottom + _FONT + 4, axis.label))
    return _svg(title, width, bottom + _ROW + 4, parts)


def dot_chart(
    rows: Sequence[tuple[str, Sequence[Dot]]],
    names: Sequence[str],
    *,
    title: str,
    axis: Axis,
    mark: tuple[float, str] | None = None,
    width: int = 720,
) -> str:
    """Values with their intervals on a common axis, one row per label and in it a line per series.

    Args:
        rows: Labels from top to bottom, each with at most one dot per series; one that is not finite is not drawn.
        names: Of the series; a legend names them if there are several.
        title: What the chart shows, in words, for who cannot see it.
        axis: Of the values; linear.
        mark: A value to compare with, drawn as a dashed line, and what it is.
        width: Pixels of the whole chart.

    Returns:
        An ``<svg>`` element. Without a value that can be drawn it says so.
    """
    dots = [dot for _, row in rows for dot in row]
    values = [value for dot in dots for value in (dot.value, dot.low, dot.high) if math.isfinite(value)]
    if not values:
        return _empty(title, width)
    above = width < _NARROW
    left = 2.0 * _PAD if above else min(max(_text_width(label) for label, _ in rows) + _PAD, width * 0.4)
    right = width - max(_text_width(dot.text) for dot in dots) - 2 * _PAD
    horizontal = Mapping.fit(axis, values + ([mark[0]] if mark else []), left + 6, right - _PAD, rounded=True)
    parts: list[str] = []
    top = _ROW + _PAD if mark else 0
    y = float(top)
    for label, row in rows:
        parts.append(_rule(0, y, width, y))
        parts.append(_text(0, y + 14, _shorten(label, width if above else left - _PAD), hint=label))
        y += _ROW if above else 0
        for index, dot in enumerate(row):
            parts += _dot(index, dot, horizontal, y + _ROW / 2)
            parts.append(_text(width, y + 14, dot.text, "end"))
            y += _ROW
        y += 4
    axes = _x_axis(horizontal, top, y)
    if mark:
        at = horizontal(mark[0])
        axes.append(_rule(at, _ROW, at, y, 'stroke-dasharray="4 3"', opacity=0.8))
        axes.append(_text(at, _FONT, mark[1], "end" if at > width / 2 else "start"))
    y += 2 * _ROW + _PAD
    if len(names) > 1:
        legend, y = _legend(names, y, width, True)
        parts += legend
    return _svg(title, width, y + _PAD, [*axes, *parts])


def meter(fraction: float, width: int = 60) -> str:
    """A small bar for a cell of a table that has the number too, so it is hidden from who reads the page aloud.

    Args:
        fraction: Of the width; clamped to 0..1.
        width: Pixels.
    """
    filled = width * min(max(fraction, 0.0), 1.0) if math.isfinite(fraction) else 0.0
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="10" viewBox="0 0 {width} 10" '
        f'aria-hidden="true"><rect width="{width}" height="10" style="fill:currentColor" opacity="0.12"/>'
        f'<rect width="{_px(filled)}" height="10" style="fill:{_color(0)}"/></svg>'
    )


def _drawable(point: Point, x: Axis, y: Axis) -> Point | None:
    """The point, or None for a gap."""
    shown = all(math.isfinite(value) and (value > 0 or not axis.log) for value, axis in zip(point, (x, y), strict=True))
    return point if shown else None


def _in_band(entry: tuple[float, float, float], x: Axis, y: Axis) -> bool:
    return all(_drawable((entry[0], edge), x, y) is not None for edge in entry[1:])


# ------------------------------------------------------------------------------------------------- pieces


def _svg(title: str, width: int, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" width="{width}" '
        f'height="{_px(height)}" viewBox="0 0 {width} {_px(height)}" font-size="{_FONT}" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def _empty(title: str, width: int) -> str:
    return _svg(title, width, 3 * _ROW, [_text(0, 2 * _ROW, "nothing to show")])


def _text(x: float, y: float, text: str, anchor: str = "start", hint: str = "") -> str:
    tooltip = f"<title>{escape(hint)}</title>" if hint not in ("", text) else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{_px(x)}" y="{_px(y)}"{place} style="fill:currentColor">{tooltip}{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, extra: str = "", *, opacity: float = 0.16) -> str:
    return (
        f'<line x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}" {extra} '
        f'style="stroke:currentColor" opacity="{opacity}"/>'
    )


def _grid(vertical: Mapping, left: float, right: float) -> list[str]:
    parts = []
    for tick in vertical.ticks:
        at = vertical(tick)
        parts += [_rule(left, at, right, at), _text(left - 4, at + 4, vertical.axis.text(tick), "end")]
    return parts


def _x_axis(horizontal: Mapping, top: float, bottom: float) -> list[str]:
    parts = [_rule(horizontal.start - 6, bottom, horizontal.end + _PAD, bottom, opacity=0.6)]
    for tick in horizontal.ticks:
        at = horizontal(tick)
        parts += [_rule(at, top, at, bottom), _text(at, bottom + 15, horizontal.axis.text(tick), "middle")]
    return [*parts, _text((horizontal.start + horizontal.end) / 2, bottom + 15 + _ROW, horizontal.axis.label, "middle")]


def _area(index: int, area: Sequence[tuple[float, float, float]], to_x: Mapping, to_y: Mapping) -> list[str]:
    if len(area) < 2:
        return []
    corners = [(to_x(x), to_y(high)) for x, _, high in area] + [(to_x(x), to_y(low)) for x, low, _ in reversed(area)]
    path = " ".join(f"{_px(x)},{_px(y)}" for x, y in corners)
    return [f'<polygon points="{path}" style="fill:{_color(index)}" opacity="0.16"/>']


def _line(
    index: int, name: str, points: Sequence[Point | None], to_x: Mapping, to_y: Mapping, marked: bool
) -> list[str]:
    """The line, broken at gaps; a marker at every point if `marked`, else at points that stand alone."""
    path: list[str] = []
    markers: list[str] = []
    for position, point in enumerate(points):
        if point is None:
            continue
        px, py = to_x(point[0]), to_y(point[1])
        joined = position > 0 and points[position - 1] is not None
        path.append(f"{'L' if joined else 'M'}{_px(px)} {_px(py)}")
        alone = not joined and (position + 1 == len(points) or points[position + 1] is None)
        if marked or alone:
            hint = f"{name}: {to_y.axis.text(point[1])} at {to_x.axis.text(point[0])}"
            markers.append(_marker(index, px, py, f"<title>{escape(hint)}</title>"))
    return [_stroke(index, "".join(path)), *markers] if path else []


def _stroke(index: int, path: str) -> str:
    dash = _DASHES[index % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke-width="1.6"{dashes} style="stroke:{_color(index)}"/>'


def _marker(index: int, x: float, y: float, inside: str = "") -> str:
    """A shape of its own for each of the first four series; from then on they repeat, hollow."""
    solid = index % 8 < 4
    style = f"stroke:{_color(index)};fill:{_color(index) if solid else 'none'}"
    shapes = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", "M-3 -3h6v6h-6z", "M0 -3.6L3.6 3h-7.2z", "M0 -4L4 0L0 4L-4 0z")
    return f'<path transform="translate({_px(x)} {_px(y)})" d="{shapes[index % 4]}" style="{style}">{inside}</path>'


def _dot(index: int, dot: Dot, to_x: Mapping, y: float) -> list[str]:
    """The value's marker on the line of its interval."""
    if not math.isfinite(dot.value):
        return []
    parts = []
    if math.isfinite(dot.low) and math.isfinite(dot.high):
        low, high = to_x(dot.low), to_x(dot.high)
        path = f"M{_px(low)} {_px(y - 3)}v6m0 -3H{_px(high)}m0 -3v6"
        parts.append(f'<path d="{path}" fill="none" stroke-width="1.6" style="stroke:{_color(index)}"/>')
    return [*parts, _marker(index, to_x(dot.value), y)]


def _legend(names: Sequence[str], top: float, width: int, marked: bool) -> tuple[list[str], float]:
    """The entries, as many in a row as fit, and where the chart ends below them."""
    parts: list[str] = []
    x, y = 0.0, top + _ROW
    for index, name in enumerate(names):
        label = _shorten(name, width - _SWATCH)
        needed = _SWATCH + _text_width(label) + 2 * _PAD
        if x and x + needed > width + 2 * _PAD:
            x, y = 0.0, y + _ROW
        parts.append(_stroke(index, f"M{_px(x)} {_px(y - 4)}h{_SWATCH - 6}"))
        if marked:
            parts.append(_marker(index, x + (_SWATCH - 6) / 2, y - 4))
        parts.append(_text(x + _SWATCH, y, label, hint=name))
        x += needed
    return parts, y + _PAD


def _color(index: int) -> str:
    index %= len(COLORS)
    return f"var(--series-{index + 1},{COLORS[index]})"


def _text_width(text: str) -> float:
    return (len(text) + _PERCENT * text.count("%")) * _CHARACTER


def _shorten(text: str, pixels: float) -> str:
    """The text, or its ends where it is too long: names differ at both."""
    fits = max(int(pixels / _CHARACTER + 1e-6), 3)
    if len(text) <= fits:
        return text
    head = (fits - 1) // 2
    return f"{text[:head]}…{text[len(text) - (fits - 1 - head) :]}"


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
