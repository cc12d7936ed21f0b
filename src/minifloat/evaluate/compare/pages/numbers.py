"""Formatting of the numbers of a comparison.

An interval follows its value, and the width of the interval decides the digits of both: ``+0.31% [0.12, 0.50]``.
"""

from __future__ import annotations

import math

from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.summary import Summary
from minifloat.report.axes import format_number

#: Text in place of an interval for which there is too little data.
NO_INTERVAL = "[?]"
_TINY = 1e-4  #: smaller numbers are written with an exponent
_DECIMALS = 6  #: largest number of decimals of a number that is not tiny
_CERTAIN = 4  #: digits of a number without an interval


def number(value: float, digits: int = _CERTAIN) -> str:
    """Format a number with `digits` significant digits; Inf is ``∞`` and NaN is ``-``."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) < _TINY or abs(value) >= 10**6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{_decimals(value, digits)}f}"


def _decimals(value: float, digits: int) -> int:
    return max(digits - 1 - math.floor(math.log10(abs(value))), 0) if value else 0


def short(value: float) -> str:
    """Format a number that a person chose, such as a bound: at most four digits, without trailing zeros."""
    return format_number(float(f"{value:.{_CERTAIN}g}")) if math.isfinite(value) else number(value)


def percent(value: float) -> str:
    """Format a fraction that a person chose in percent, without trailing zeros."""
    return f"{short(100 * value)}%" if math.isfinite(value) else number(value)


def change(value: float) -> str:
    """Format a relative change in percent, with its sign."""
    return f"{value:+.2%}" if math.isfinite(value) else number(value)


def interval_parts(
    estimate: Estimate, *, as_percent: bool = False, signed: bool = False, digits: int = 2
) -> tuple[str, str]:
    """Format a value and its interval; the interval is `NO_INTERVAL` if the estimate has none."""
    values = [100 * end if as_percent else end for end in (estimate.value, estimate.low, estimate.high)]
    unit = "%" if as_percent else ""
    reach = (values[2] - values[1]) / 2
    if not math.isfinite(values[0]):
        return number(values[0]), NO_INTERVAL
    known = math.isfinite(reach)
    if known and reach > 0:
        texts = [_to_digits(value, values[0], reach, digits) for value in values]
    else:
        texts = [short(value) for value in values]
    sign = "+" if signed and values[0] > 0 else ""
    return f"{sign}{texts[0]}{unit}", f"[{texts[1]}, {texts[2]}]" if known else NO_INTERVAL


def _to_digits(value: float, middle: float, reach: float, digits: int) -> str:
    """Format a value with the decimals that `digits` significant digits of `reach`, half the width, have."""
    if abs(middle) + reach < _TINY:
        return number(value, 3)
    decimals = digits - 1 - math.floor(math.log10(reach * 1.05))  # 0.0999 counts as 0.1
    return f"{value:,.{min(max(decimals, 0), _DECIMALS)}f}"


def with_interval(estimate: Estimate, *, as_percent: bool = False, signed: bool = False, digits: int = 2) -> str:
    """Format a value with its interval, ``+0.31% [0.12, 0.50]``; the arguments are those of `interval_parts`."""
    return " ".join(interval_parts(estimate, as_percent=as_percent, signed=signed, digits=digits))


def increase(summary: Summary) -> Estimate:
    """Return the relative increase of perplexity as a fraction."""
    return summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)
