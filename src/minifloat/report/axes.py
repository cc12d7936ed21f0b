"""Axes of charts: their ticks, the text of their numbers, and the mapping from values to pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_PIXELS_PER_TICK = 60


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        low: First value; None: the smallest of the data.
        high: Last value; None: the largest of the data.
    """

    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False
    percent: bool = False
    at: tuple[float, ...] = ()

    def text(self, value: float) -> str:
        """Return a value as text in the notation of this axis."""
        return f"{format_number(100 * value)}%" if self.percent and math.isfinite(value) else format_number(value)


def format_number(value: float) -> str:
    """Return a number as short text (``0.25``, ``1,200``, ``3e-7``), or a dash if it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def nice_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers within ``[low, high]``, 1, 2 or 5 times a power of ten apart."""
    if not low < high:
        return [low]
    ticks: list[float] = []
    for finer in (1, 2, 4):
        step = _nice_step((high - low) / max(count * finer, 1), whole)
        ticks = [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(ticks) > 1:
            break
    return ticks


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers within ``[low, high]``, both above 0, for a log axis.

    The ticks are powers of ten: every n-th one if there are too many, with multiples between them if there are too few.
    A range too short for two of these gets the ticks of a linear axis.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / max(count, 1)))
    for factors, stride in (((1, 1.5, 2, 3, 5, 7), 1), ((1, 2, 5), 1), ((1,), 1), ((1,), every)):
        exponents = range(-(-first // stride) * stride, last + 1, stride)
        ticks = [float(f"{factor}e{exponent}") for exponent in exponents for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= count + 2:
            break
    return ticks if len(ticks) > 1 else nice_ticks(low, high, count)


@dataclass(frozen=True)
class PixelMapping:
    """A function from the values of an axis to pixels, linear or logarithmic."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def fit(
        cls, axis: Axis, values: Sequence[float], start: float, end: float, *, rounded: bool = False
    ) -> PixelMapping:
        """Return a mapping whose range holds all values; with `rounded`, the range is widened to round numbers."""
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if not low < high:
            room = 0.5 if axis.whole or not low else abs(low) / 2
            below, above = (low / 2, low * 2) if axis.log else (low - room, low + room)
            low, high = below if axis.low is None else low, above if axis.high is None or axis.low is not None else high
        count = max(2, int(abs(end - start) / _PIXELS_PER_TICK))
        if rounded and axis.log:
            room = (high / low) ** 0.04
            low, high = low / room, high * room
        elif rounded:
            step = _nice_step((high - low) / count, axis.whole)
            low = math.floor(low / step) * step if axis.low is None else low
            high = math.ceil(high / step) * step if axis.high is None else high
        ticks = log_ticks(low, high, count) if axis.log else nice_ticks(low, high, count, whole=axis.whole)
        return cls(axis, low, high, start, end, axis.at or tuple(ticks))

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values outside of the range are clamped to it."""
        inside = min(max(value, self.low), self.high)
        if self.axis.log:
            part = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            part = (inside - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def _nice_step(least: float, whole: bool) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `least`; at least 1 if `whole`."""
    exponent = math.floor(math.log10(least))
    step = next(
        float(f"{factor}e{exponent}") for factor in (1, 2, 5, 10) if float(f"{factor}e{exponent}") >= least * 0.999
    )
    return max(step, 1.0) if whole else step
