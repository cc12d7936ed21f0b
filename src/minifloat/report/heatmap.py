"""A heatmap: a row per name, a column per position, darker where a value is larger."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minifloat.report.axes import format_number
from minifloat.report.svg import (
    FONT_SIZE,
    PAD,
    ROW,
    empty,
    escape,
    label,
    px,
    rule,
    series_color,
    shorten,
    svg,
    text_width,
)

_NARROW = 480  #: pixels of a chart; below this width the names are above their rows
_STEPS = 8  #: number of shades; equal neighbours become one rectangle
_SWATCH = 18


def heatmap(
    rows: Sequence[tuple[str, Sequence[float]]],
    *,
    title: str,
    low: float,
    high: float,
    unit: str,
    columns: str,
    width: int = 720,
) -> str:
    """Return a heatmap with a scale of its shades below."""
    length = max((len(values) for _, values in rows), default=0)
    if not length or not 0 < low < high:
        return empty(title, width)
    above = width < _NARROW
    left = 0.0 if above else min(max(text_width(name) for name, _ in rows) + PAD, width * 0.4)
    parts, y = [], 0.0
    for name, values in rows:
        shown = shorten(name, width if above else left - PAD)
        parts.append(label(0, y + 13, shown, hint=name))
        y += ROW if above else 0
        parts += _cells([_step(value, low, high) for value in values], left, y, (width - left) / length)
        y += ROW
    parts += [rule(left, y, width, y, opacity=0.6), label((left + width) / 2, y + FONT_SIZE + 4, columns, "middle")]
    y += 2 * ROW + PAD
    for step in range(_STEPS):
        parts.append(_cell(left + step * _SWATCH, y - FONT_SIZE, _SWATCH, FONT_SIZE, step))
    right = left + _STEPS * _SWATCH + PAD
    parts.append(label(right, y, f"{format_number(low)} to {format_number(high)} {unit}"))
    return svg(title, width, y + PAD, parts)


def _step(value: float, low: float, high: float) -> int:
    """Return the shade of a value, 0 .. `_STEPS` - 1."""
    if not math.isfinite(value) or value <= low:
        return 0
    return min(int(math.log(value / low) / math.log(high / low) * _STEPS), _STEPS - 1)


def _cells(steps: Sequence[int], left: float, y: float, size: float) -> list[str]:
    """Return the rectangles of a row; neighbours of one shade become one."""
    parts, start = [], 0
    for index in range(1, len(steps) + 1):
        if index == len(steps) or steps[index] != steps[start]:
            parts.append(_cell(left + start * size, y + 1, (index - start) * size, ROW - 2, steps[start]))
            start = index
    return parts


def _cell(x: float, y: float, width: float, height: float, step: int) -> str:
    opacity = 0.06 + 0.94 * step / (_STEPS - 1)
    color = escape(series_color(1))
    return (
        f'<rect x="{px(x)}" y="{px(y)}" width="{width:.2f}" height="{px(height)}" style="fill:{color}" '
        f'opacity="{opacity:.2f}"/>'
    )
