"""The axes of charts: which numbers stand at them, how those are written, and where a value lies in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TICK_EVERY = 60  #: pixels


@dataclass(frozen=True)
class Axis:
    """One axis of a chart.

    Attributes:
        label: What it measures, with the unit.
        log: Logarithmic; values that are not above 0 are left out.
        low: Where it begins; None: where the data does.
        high: Where it ends; None: where the data does.
        whole: Ticks at whole numbers only, as for layers.
        percent: Values are fractions and are written as percentages.
    """

    label: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    whole: bool = False
    percent: bool = False

    def text(self, value: float) -> str:
        """A value as it stands at this axis."""
        return f"{format_number(100 * value)}%" if self.percent and math.isfinite(value) else format_number(value)


def format_number(value: float) -> str:
    """A number as short as an axis needs it: ``0.25``, ``1,200``, ``3e-7``; a dash where it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def nice_ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within ``[low, high]``."""
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
    """About `count` round numbers within ``[low, high]``, both above 0, for a log axis.

    Powers of ten, fewer or with multiples between them as there is room; over less than that, those of a linear axis.
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
class Mapping:
    """From values to pixels, linear or logarithmic."""

    axis: Axis
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def fit(cls, axis: Axis, values: Sequence[float], start: float, end: float, *, rounded: bool = False) -> Mapping:
        """An axis that shows all values, and, if `rounded`, ends at a round number."""
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if not low < high:
            room = 0.5 if axis.whole or not low else abs(low) / 2
            below, above = (low / 2, low * 2) if axis.log else (low - room, low + room)
            low, high = below if axis.low is None else low, above if axis.high is None or axis.low is not None else high
        count = max(2, int(abs(end - start) / _TICK_EVERY))
        if rounded and axis.log:
            room = (high / low) ** 0.04
            low, high = low / room, high * room
        elif rounded:
            step = _nice_step((high - low) / count, axis.whole)
            low = math.floor(low / step) * step if axis.low is None else low
            high = math.ceil(high / step) * step if axis.high is None else high
        ticks = log_ticks(low, high, count) if axis.log else nice_ticks(low, high, count, whole=axis.whole)
        return cls(axis, low, high, start, end, tuple(ticks))

    def __call__(self, value: float) -> float:
        """The pixel; values beyond an end of the axis lie on it."""
        inside = min(max(value, self.low), self.high)
        if self.axis.log:
            part = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            part = (inside - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def _nice_step(least: float, whole: bool) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`; at least 1 if `whole`."""
    exponent = math.floor(math.log10(least))
    step = next(
        float(f"{factor}e{exponent}") for factor in (1, 2, 5, 10) if float(f"{factor}e{exponent}") >= least * 0.999
    )
    return max(step, 1.0) if whole else step
