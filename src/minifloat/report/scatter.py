"""A scatter chart of named points, with the front of those that no other point beats in both coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.report.axes import Axis, PixelMapping
from minifloat.report.svg import (
    FONT_SIZE,
    PAD,
    ROW,
    empty,
    label,
    marker,
    px,
    rule,
    series_color,
    shorten,
    svg,
    text_width,
    x_axis,
    y_axis,
)

_NAME = 0.45  #: largest part of the chart's width that a name takes


@dataclass(frozen=True)
class ScatterPoint:
    """A named point, and the ends of the interval of its y (NaN: no interval)."""

    name: str
    x: float
    y: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Box) -> bool:
        """Return whether the two share any area."""
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


def pareto_front(points: Sequence[ScatterPoint]) -> list[ScatterPoint]:
    """Return the points for which no other has at most the same x and at most the same y, by ascending x."""
    front: list[ScatterPoint] = []
    for point in sorted(points, key=lambda point: (point.x, point.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def scatter_chart(
    points: Sequence[ScatterPoint],
    *,
    title: str,
    x: Axis,
    y: Axis,
    mark: tuple[float, str] | None = None,
    width: int = 720,
    plot_height: int = 280,
) -> str:
    """Return a chart of points with their names beside them; less is better on both axes."""
    shown = [point for point in points if _is_drawable(point.x, x) and _is_drawable(point.y, y)]
    if not shown:
        return empty(title, width)
    ends = [end for point in shown for end in (point.low, point.high) if _is_drawable(end, y)]
    top, bottom = float(ROW + PAD), float(ROW + PAD + plot_height)
    values = [*(point.y for point in shown), *ends, *([mark[0]] if mark else [])]
    vertical = PixelMapping.fit(y, values, bottom, top, rounded=True)
    left = max(text_width(y.text(tick)) for tick in vertical.ticks) + 10
    horizontal = PixelMapping.fit(x, [point.x for point in shown], left + PAD, width - 2 * PAD, rounded=True)
    parts = [label(0, FONT_SIZE, y.label), *y_axis(vertical, left, width - PAD), *x_axis(horizontal, top, bottom)]
    taken = [_Box(horizontal(p.x) - 5, vertical(p.y) - 5, horizontal(p.x) + 5, vertical(p.y) + 5) for p in shown]
    if mark:
        line = vertical(mark[0])
        length = text_width(mark[1])
        places = [_Box(at, line - FONT_SIZE - 4, at + length, line) for at in (width - PAD - length, left + 4)]
        place = next((place for place in places if not any(place.overlaps(box) for box in taken)), places[0])
        parts += [rule(left, line, width - PAD, line, 'stroke-dasharray="4 3"', opacity=0.8)]
        parts.append(label(place.left, line - 4, mark[1]))
        taken.append(place)
    parts += _front(pareto_front(shown), horizontal, vertical)
    for point in shown:
        parts += _point(point, horizontal, vertical)
    for point in shown:
        name = shorten(point.name, width * _NAME)
        placed = _place(name, horizontal(point.x), vertical(point.y), _Box(left, top - PAD, width, bottom), taken)
        if placed is not None:
            taken.append(placed)
            parts.append(label(placed.left, placed.bottom - 3, name, hint=point.name))
    return svg(title, width, bottom + 2 * ROW + PAD, parts)


def _is_drawable(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def _front(points: Sequence[ScatterPoint], to_x: PixelMapping, to_y: PixelMapping) -> list[str]:
    """Return the steps between the points of the front."""
    if len(points) < 2:
        return []
    first, *others = points
    path = f"M{px(to_x(first.x))} {px(to_y(first.y))}" + "".join(
        f"H{px(to_x(point.x))}V{px(to_y(point.y))}" for point in others
    )
    return [f'<path d="{path}" fill="none" stroke-dasharray="2 3" style="stroke:{series_color(0)}" opacity="0.6"/>']


def _point(point: ScatterPoint, to_x: PixelMapping, to_y: PixelMapping) -> list[str]:
    x, y = to_x(point.x), to_y(point.y)
    parts = []
    if _is_drawable(point.low, to_y.axis) and _is_drawable(point.high, to_y.axis):
        path = f"M{px(x - 3)} {px(to_y(point.low))}h6m-3 0V{px(to_y(point.high))}m-3 0h6"
        parts.append(f'<path d="{path}" fill="none" stroke-width="1.6" style="stroke:{series_color(0)}"/>')
    hint = f"{point.name}: {to_y.axis.text(point.y)} at {to_x.axis.text(point.x)}"
    return [*parts, marker(0, x, y, hint)]


def _place(name: str, x: float, y: float, inside: _Box, taken: Sequence[_Box]) -> _Box | None:
    """Return the first place beside a point that is free; None where there is none, and the table has the name."""
    length, height = text_width(name), FONT_SIZE + 2
    for left, top in (
        (x + 6, y - height - 3),
        (x + 9, y - height / 2),
        (x - 9 - length, y - height / 2),
        (x + 6, y + 5),
        (x - 6 - length, y - height - 5),
        (x - 6 - length, y + 5),
        (x - length / 2, y - height - 8),
        (x - length / 2, y + 8),
    ):
        box = _Box(left, top, left + length, top + height)
        fits = inside.left <= box.left and box.right <= inside.right
        fits = fits and inside.top <= box.top and box.bottom <= inside.bottom
        if fits and not any(box.overlaps(other) for other in taken):
            return box
    return None
