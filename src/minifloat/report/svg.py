"""SVG elements as text: lines, areas, markers, axes, legends, and the frame around them.

Pure functions of numbers without clock, randomness or network requests, so equal input gives equal bytes. Colours are
CSS variables (``--series-1`` ...) with a fallback: a page can choose them for light and dark backgrounds, and a chart
also works alone. `report.charts` puts the elements together.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from minifloat.report.axes import PixelMapping

#: x and y of a point of a line.
Point: TypeAlias = tuple[float, float]

#: Fallback colours of the series, for light and, with less contrast, dark backgrounds.
COLORS = ("#1f6fb4", "#b8520a", "#1a7f4b", "#8250df", "#b3305c", "#0e7c86", "#7a5c1e", "#59636e")
#: Colours of the series for dark backgrounds.
DARK_COLORS = ("#6cb6ff", "#f0983e", "#57c27f", "#b999f5", "#ff7fa6", "#39c5cf", "#d9b04c", "#a5adb6")
#: Colour of the text, and colours of the series, on light and on dark backgrounds.
_INKS = (("#1c2128", COLORS), ("#e6edf3", DARK_COLORS))

#: Pixels: the size of the text, the height of one row of text, the space between elements.
FONT_SIZE, ROW, PAD = 12, 18, 8

_CHARACTER = 6.4  #: average width of a character in pixels at `FONT_SIZE`
_PERCENT = 0.8  #: additional width of a percent sign, in characters
_SWATCH = 30  #: pixels of the sample line before a legend entry
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 4", "6 2 1 2 1 2")
_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: object) -> str:
    """Return text for SVG and HTML: markup is escaped, and characters that XML cannot hold are replaced."""
    return html.escape(_INVALID_IN_XML.sub("\ufffd", str(text)))


def svg(title: str, width: int, height: float, parts: Iterable[str]) -> str:
    """Return the ``<svg>`` element around the parts; screen readers read its title aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" width="{width}" '
        f'height="{px(height)}" viewBox="0 0 {width} {px(height)}" font-size="{FONT_SIZE}" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def standalone(chart: str) -> str:
    """Return a chart as a file of its own: its style has text and series colours for light and dark backgrounds."""
    light, dark = (f"svg{{color:{ink};{color_variables(colors)}}}" for ink, colors in _INKS)
    style = f"<style>{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"
    head, bracket, rest = chart.partition(">")
    return f"{head}{bracket}{style}{rest}\n"


def color_variables(colors: Sequence[str]) -> str:
    """Return CSS that sets the colours of the series."""
    return "".join(f"--series-{index}:{color};" for index, color in enumerate(colors, 1))


def empty(title: str, width: int) -> str:
    """Return a chart that says that there is nothing to show."""
    return svg(title, width, 3 * ROW, [label(0, 2 * ROW, "nothing to show")])


def label(x: float, y: float, text: str, anchor: str = "start", hint: str = "") -> str:
    """Return a text element."""
    tooltip = f"<title>{escape(hint)}</title>" if hint not in ("", text) else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{px(x)}" y="{px(y)}"{place} style="fill:currentColor">{tooltip}{escape(text)}</text>'


def rule(x1: float, y1: float, x2: float, y2: float, extra: str = "", *, opacity: float = 0.16) -> str:
    """Return a straight line in the colour of the text."""
    return (
        f'<line x1="{px(x1)}" y1="{px(y1)}" x2="{px(x2)}" y2="{px(y2)}" {extra} '
        f'style="stroke:currentColor" opacity="{opacity}"/>'
    )


def reference_line(x: float, bottom: float, text: str, width: int) -> list[str]:
    """Return a dashed vertical line from below its text down to `bottom`."""
    return [
        rule(x, ROW, x, bottom, 'stroke-dasharray="4 3"', opacity=0.8),
        label(x, FONT_SIZE, text, "end" if x > width / 2 else "start"),
    ]


def vertical_mark(x: float, top: float, bottom: float, text: str, middle: float) -> list[str]:
    """Return a dashed vertical line from `top` with its text beside its end, at the left if it is right of `middle`."""
    place, anchor = (x - 4, "end") if x > middle else (x + 4, "start")
    return [
        rule(x, top + 4, x, bottom, 'stroke-dasharray="4 3"', opacity=0.8),
        label(place, top + FONT_SIZE + 2, text, anchor),
    ]


def horizontal_bar(x: float, y: float, length: float) -> str:
    """Return a bar of the first series' colour in the row of text that begins at `y`."""
    return f'<rect x="{px(x)}" y="{px(y + 3)}" width="{px(length)}" height="{ROW - 4}" style="fill:{series_color(0)}"/>'


def y_axis(vertical: PixelMapping, left: float, right: float) -> list[str]:
    """Return a grid line and its number for each tick of a vertical axis."""
    parts = []
    for tick in vertical.ticks:
        y = vertical(tick)
        parts += [rule(left, y, right, y), label(left - 4, y + 4, vertical.axis.text(tick), "end")]
    return parts


def x_axis(horizontal: PixelMapping, top: float, bottom: float) -> list[str]:
    """Return a horizontal axis with grid lines, numbers and its label."""
    parts = [rule(horizontal.start - 6, bottom, horizontal.end + PAD, bottom, opacity=0.6)]
    for tick in horizontal.ticks:
        x = horizontal(tick)
        parts += [rule(x, top, x, bottom), label(x, bottom + 15, horizontal.axis.text(tick), "middle")]
    center = (horizontal.start + horizontal.end) / 2
    return [*parts, label(center, bottom + 15 + ROW, horizontal.axis.label, "middle")]


def area(index: int, edges: Sequence[tuple[float, float, float]], to_x: PixelMapping, to_y: PixelMapping) -> list[str]:
    """Return the shaded area of a series between edges given as ``(x, low, high)``."""
    if len(edges) < 2:
        return []
    corners = [(to_x(x), to_y(high)) for x, _, high in edges] + [(to_x(x), to_y(low)) for x, low, _ in reversed(edges)]
    path = " ".join(f"{px(x)},{px(y)}" for x, y in corners)
    return [f'<polygon points="{path}" style="fill:{series_color(index)}" opacity="0.16"/>']


def polyline(
    index: int, name: str, points: Sequence[Point | None], to_x: PixelMapping, to_y: PixelMapping, marked: bool
) -> list[str]:
    """Return the line of a series, interrupted where a point is None."""
    path: list[str] = []
    markers: list[str] = []
    for position, point in enumerate(points):
        if point is None:
            continue
        x, y = to_x(point[0]), to_y(point[1])
        joined = position > 0 and points[position - 1] is not None
        path.append(f"{'L' if joined else 'M'}{px(x)} {px(y)}")
        alone = not joined and (position + 1 == len(points) or points[position + 1] is None)
        if marked or alone:
            hint = f"{name}: {to_y.axis.text(point[1])} at {to_x.axis.text(point[0])}"
            markers.append(marker(index, x, y, hint))
    return [_stroke(index, "".join(path)), *markers] if path else []


def interval_dot(index: int, value: float, low: float, high: float, to_x: PixelMapping, y: float) -> list[str]:
    """Return a marker at the value, on a line from `low` to `high` if both are finite; nothing for a NaN value."""
    if not math.isfinite(value):
        return []
    parts = []
    if math.isfinite(low) and math.isfinite(high):
        path = f"M{px(to_x(low))} {px(y - 3)}v6m0 -3H{px(to_x(high))}m0 -3v6"
        parts.append(f'<path d="{path}" fill="none" stroke-width="1.6" style="stroke:{series_color(index)}"/>')
    return [*parts, marker(index, to_x(value), y)]


def legend(names: Sequence[str], top: float, width: int, marked: bool) -> tuple[list[str], float]:
    """Return the entries of a legend, as many per row as fit, and the y at which the legend ends."""
    parts: list[str] = []
    x, y = 0.0, top + ROW
    for index, name in enumerate(names):
        text = shorten(name, width - _SWATCH)
        needed = _SWATCH + text_width(text) + 2 * PAD
        if x and x + needed > width + 2 * PAD:
            x, y = 0.0, y + ROW
        parts.append(_stroke(index, f"M{px(x)} {px(y - 4)}h{_SWATCH - 6}"))
        if marked:
            parts.append(marker(index, x + (_SWATCH - 6) / 2, y - 4))
        parts.append(label(x + _SWATCH, y, text, hint=name))
        x += needed
    return parts, y + PAD


def _stroke(index: int, path: str) -> str:
    dash = _DASHES[index % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke-width="1.6"{dashes} style="stroke:{series_color(index)}"/>'


def marker(index: int, x: float, y: float, hint: str = "") -> str:
    """Return the marker of a series: four shapes, filled for the first four series and hollow for the next four."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    style = f"stroke:{series_color(index)};fill:{series_color(index) if index % 8 < 4 else 'none'}"
    shapes = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", "M-3 -3h6v6h-6z", "M0 -3.6L3.6 3h-7.2z", "M0 -4L4 0L0 4L-4 0z")
    return f'<path transform="translate({px(x)} {px(y)})" d="{shapes[index % 4]}" style="{style}">{inside}</path>'


def series_color(index: int) -> str:
    """Return the CSS colour of a series."""
    index %= len(COLORS)
    return f"var(--series-{index + 1},{COLORS[index]})"


def text_width(text: str) -> float:
    """Return the estimated width of a text in pixels."""
    return (len(text) + _PERCENT * text.count("%")) * _CHARACTER


def shorten(text: str, pixels: float) -> str:
    """Return the text, with its middle cut out if it is wider than `pixels`: names differ at both ends."""
    fits = max(int(pixels / _CHARACTER + 1e-6), 3)
    if len(text) <= fits:
        return text
    head = (fits - 1) // 2
    return f"{text[:head]}…{text[len(text) - (fits - 1 - head) :]}"


def px(value: float) -> str:
    """Return a length in pixels with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")
