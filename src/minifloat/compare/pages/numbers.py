"""How the numbers of a comparison are written.

An interval stands behind its value, both with the digits that the interval allows: ``+0.31% [0.12, 0.50]``.
"""

from __future__ import annotations

import math

from minifloat.compare.intervals import Estimate
from minifloat.compare.summary import Summary
from minifloat.report.axes import format_number

#: How an interval is written that there is too little data for.
NO_INTERVAL = "[?]"
_TINY = 1e-4  #: below, numbers are written with an exponent
_DECIMALS = 6  #: at most, of a number that is not tiny
_CERTAIN = 4  #: digits of a number without an interval


def number(value: float, digits: int = _CERTAIN) -> str:
    """A number with so many digits; ``∞`` and ``-`` where there is none."""
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
    """The same without zeros at the end, for numbers that somebody chose."""
    return format_number(float(f"{value:.{_CERTAIN}g}")) if math.isfinite(value) else number(value)


def percent(value: float) -> str:
    """A fraction in percent, likewise."""
    return f"{short(100 * value)}%" if math.isfinite(value) else number(value)


def change(value: float) -> str:
    """A relative change in percent, with its sign."""
    return f"{value:+.2%}" if math.isfinite(value) else number(value)


def interval_parts(
    estimate: Estimate, *, as_percent: bool = False, signed: bool = False, digits: int = 2
) -> tuple[str, str]:
    """A value and its interval, which is `NO_INTERVAL` where there is none.

    Args:
        estimate: What was measured.
        as_percent: It is a fraction, and written in percent; the sign ``%`` stands behind the value alone.
        signed: Write ``+`` too.
        digits: Of what the interval reaches, which says how many all numbers get.
    """
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
    """As many digits as an interval that reaches so far leaves."""
    if abs(middle) + reach < _TINY:
        return number(value, 3)
    decimals = digits - 1 - math.floor(math.log10(reach * 1.05))  # 0.0999 counts as 0.1
    return f"{value:,.{min(max(decimals, 0), _DECIMALS)}f}"


def with_interval(estimate: Estimate, *, as_percent: bool = False, signed: bool = False, digits: int = 2) -> str:
    """``+0.31% [0.12, 0.50]``; see `interval_parts`."""
    return " ".join(interval_parts(estimate, as_percent=as_percent, signed=signed, digits=digits))


def increase(summary: Summary) -> Estimate:
    """By how much the perplexity is larger, as a fraction."""
    return summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)
