"""A picture of schemes that stands alone, as in a README: KL divergence on the left, speed on the right.

The file brings its own style, with colours for light and for dark backgrounds, because a page that shows it as an image
lends it none.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.report.axes import Axis, PixelMapping, format_number
from minifloat.report.svg import (
    FONT_SIZE,
    PAD,
    ROW,
    horizontal_bar,
    interval_dot,
    label,
    rule,
    standalone,
    svg,
    text_width,
)

_WIDTH = 820
_ROW = ROW + 8
_GAP = 28  #: pixels between the two columns
_SIGNIFICANT = 2
_NOTE_LENGTH = 120  #: characters of a line below the chart


@dataclass(frozen=True)
class PictureRow:
    """One scheme.

    Attributes:
        kl: Mean KL divergence from the original, nats per token; above 0.
        low: Lower end of its interval; NaN without an interval.
        high: Upper end of its interval; NaN without an interval.
        speed: Speed of a decode step relative to BF16; None if it was not measured.
    """

    name: str
    kl: float
    low: float
    high: float
    speed: float | None


def scheme_picture(rows: Sequence[PictureRow], *, notes: Sequence[str]) -> str:
    """Return an ``<svg>`` document: a row for each scheme, and notes below."""
    names = max(text_width(row.name) for row in rows) + 2 * PAD
    middle = names + (_WIDTH - names) * 0.55
    values = [value for row in rows for value in (row.kl, row.low, row.high) if value > 0 and math.isfinite(value)]
    kl = PixelMapping.fit(Axis(log=True), values, names, middle - _GAP - 6 * FONT_SIZE, rounded=True)
    speeds = [row.speed for row in rows if row.speed is not None]
    right = _WIDTH - 4 * FONT_SIZE
    speed = PixelMapping.fit(Axis(low=0.0), [*speeds, 1.0], middle, right)
    top, end = 2 * ROW + PAD, 2 * ROW + PAD + _ROW * len(rows)
    parts = [
        label(names, FONT_SIZE, "KL divergence from BF16, nats per token"),
        label(names, FONT_SIZE + ROW - 2, "(left is better)"),
        label(middle, FONT_SIZE, "decode speed, BF16 = 1"),
        label(middle, FONT_SIZE + ROW - 2, "(right is better)"),
    ]
    for tick in kl.ticks:
        parts += [
            rule(kl(tick), top, kl(tick), end),
            label(kl(tick), end + FONT_SIZE + 2, format_number(tick), "middle"),
        ]
    one = speed(1.0)
    parts += [
        rule(one, top, one, end, 'stroke-dasharray="4 3"', opacity=0.8),
        rule(middle, top, middle, end, opacity=0.6),
    ]
    parts.append(label(one, end + FONT_SIZE + 2, "BF16", "middle"))
    for index, row in enumerate(rows):
        y = top + _ROW * index
        base = y + 4
        parts += [rule(0, y, _WIDTH, y, opacity=0.1), label(0, base + 14, row.name)]
        low, high = (value if value > 0 else kl.low for value in (row.low, row.high))
        parts += interval_dot(0, row.kl, low, high, kl, base + ROW / 2)
        parts.append(label(middle - _GAP, base + 14, _short(row.kl), "end"))
        if row.speed is None:
            parts.append(label(middle + 6, base + 14, "not measured"))
            continue
        length = speed(row.speed) - middle
        parts += [horizontal_bar(middle, base, length), label(middle + length + 4, base + 14, f"{row.speed:.2f}x")]
    parts.append(rule(0, end, _WIDTH, end, opacity=0.1))
    y = end + 2 * ROW + PAD
    for line in (line for note in notes for line in textwrap.wrap(note, _NOTE_LENGTH)):
        parts.append(f'<g opacity="0.75">{label(0, y, line)}</g>')
        y += ROW
    title = "KL divergence and decode speed of each scheme: " + "; ".join(
        f"{row.name} KL {_short(row.kl)}" + ("" if row.speed is None else f", {row.speed:.2f} times as fast as BF16")
        for row in rows
    )
    return standalone(svg(title, _WIDTH, y, parts))


def _short(value: float) -> str:
    """Return a number with `_SIGNIFICANT` digits, zeros at its end included."""
    return f"{value:#.{_SIGNIFICANT}g}"
