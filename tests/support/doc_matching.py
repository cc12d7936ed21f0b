"""Compare the output that a page shows with the output of its command.

Words and integers have to be equal. Processors add BF16 products in another order, so that a number with a decimal
point may differ by 5% or by 3 units of the last digit that the page shows. A percentage, and the ends of its interval,
may differ by 0.15 points or a fifth of its interval, and by 1 where either side has no decimals. Times,
rates, ids, dates are not compared. A line ``...`` stands for any lines, ``...`` at the end of a line for its rest. The
width of columns does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
#: A percentage, with its interval if it has one.
_PERCENTAGE = re.compile(r"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?%(?: \[[-+\d.,]+, [-+\d.,]+\])?")
_TIME = re.compile(
    r"(?<![\w.])\d[\d,.]*(?:e[-+]\d+)? ?(?:s|ms|us|min|minutes?|seconds?|hours?|[KMG]i?B/s|tokens?/s|per second)(?!\w)"
)
_VOLATILE = (
    (re.compile(r"\b(?:chat)?cmpl-[0-9a-f]+"), "ID"),
    (re.compile(r'"created":\d+'), '"created":0'),
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?)?"), "DATE"),
    (re.compile(r"-{4,}|━+"), "----"),
)


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from that of the page."""

    relative: float = 0.05
    units: int = 3
    points: float = 0.15
    integers: bool = False
    vary: bool = False


DEFAULT_TOLERANCE = Tolerance()


def tolerance(text: str) -> Tolerance:
    """Return the tolerance that a comment states: "" (the default), "vary" or "within 20%"."""
    if not text:
        return DEFAULT_TOLERANCE
    if text == "vary":
        return Tolerance(integers=True, vary=True)
    match = re.fullmatch(r"within (\d+)%", text)
    if not match:
        raise ValueError(f"a tolerance is 'vary' or 'within 20%', not {text!r}")
    return Tolerance(relative=int(match[1]) / 100, integers=True)


def normalized(text: str) -> list[str]:
    """Return the lines of an output without escapes, empty lines, repeated spaces, times and ids."""
    text = _ESCAPES.sub("", text).replace("\r", "\n")
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    text = _TIME.sub("TIME", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _same_number(shown: str, printed: str, allowed: Tolerance, points: float = 0.0) -> bool:
    if shown == printed or allowed.vary:
        return True
    if re.fullmatch(r"[-+]?[\d,]+", shown) and not allowed.integers and not points:
        return False
    a, b = (float(number.replace(",", "")) for number in (shown, printed))
    mantissa, _, exponent = shown.replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(a - b) <= max(allowed.relative * abs(a), allowed.units * unit * (not points), points) * (1 + 1e-9)


def _same_percentages(shown: str, printed: str, allowed: Tolerance) -> bool:
    pairs = zip_longest(_PERCENTAGE.findall(shown), _PERCENTAGE.findall(printed), fillvalue="")
    for one, other in pairs:
        points = allowed.points if "." in one and "." in other else 1.0
        numbers = [re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?=[%\],])", text) for text in (one, other)]
        if len(numbers[0]) != len(numbers[1]):
            return False
        if len(numbers[0]) == 3:  # the ends of an interval are as unsure as it is wide
            low, high = (float(number.replace(",", "")) for number in numbers[0][1:])
            points = max(points, 0.2 * (high - low))
        if not all(_same_number(a, b, allowed, points) for a, b in zip(*numbers, strict=True)):
            return False
    return True


def same_line(shown: str, printed: str, allowed: Tolerance = DEFAULT_TOLERANCE) -> bool:
    """Return whether a normalized line that was printed is the one that the page shows."""
    if shown == "...":
        return True
    if shown.endswith("..."):
        words = shown.removesuffix("...").split()
        shown, printed = " ".join(words), " ".join(printed.split()[: len(words)])
    if allowed.vary:  # a rate may be finer or coarser, and a column may be empty
        return _words(shown) == _words(printed)
    if not _same_percentages(shown, printed, allowed):
        return False
    shown, printed = (_PERCENTAGE.sub("%", line) for line in (shown, printed))
    if _NUMBER.sub("0", shown) != _NUMBER.sub("0", printed):
        return False
    pairs = zip_longest(_NUMBER.findall(shown), _NUMBER.findall(printed), fillvalue="")
    return all(_same_number(a, b, allowed) for a, b in pairs)


def _words(line: str) -> list[str]:
    return _NUMBER.sub("", line).replace("TIME", "").split()


def difference(shown: str, printed: str, allowed: Tolerance = DEFAULT_TOLERANCE) -> str | None:
    """Return the first line of a page that its command did not print, beside what it printed; None if all were."""
    expected, actual = normalized(shown), normalized(printed)
    position, free = 0, False
    for number, line in enumerate(expected):
        if line == "...":
            free = True
            continue
        last = number == len(expected) - 1
        candidates = range(position, len(actual)) if free else range(position, min(position + 1, len(actual)))
        if free and last:
            candidates = range(len(actual) - 1, len(actual))
        found = next(
            (place for place in candidates if place >= position and same_line(line, actual[place], allowed)), None
        )
        if found is None:
            near = actual[position : position + 6] or ["(the end of the output)"]
            return "\n".join(
                ["the page shows", f"    {line}", "the command printed there", *(f"    {n}" for n in near)]
            )
        position, free = found + 1, False
    if position < len(actual) and not free:
        return "\n".join(["the command printed more", *(f"    {line}" for line in actual[position : position + 6])])
    return None
