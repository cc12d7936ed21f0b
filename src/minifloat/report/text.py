"""Names, text and numbers for readers: in HTML, in Markdown and on a terminal."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from minifloat.report.document import Pair

#: Colours of the series of charts, on light backgrounds.
COLORS = ("#1f6fb4", "#b8520a", "#1a7f4b", "#8250df", "#b3305c", "#0e7c86", "#7a5c1e", "#59636e")

_INVALID_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NEWLINE, _SPACE = "↵", "␣"
_CONTROL_PICTURES, _DELETE = 0x2400, 0x7F
#: Zero-width joiner and non-joiner: words of many scripts need them, so they stay.
_JOINERS = "\u200c\u200d"
#: Unicode categories: controls, formats, surrogates, separators of lines and paragraphs.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NONCHARACTERS = frozenset({0xFFFE, 0xFFFF})
_KIBI = 1 << 10
_DECIMAL_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
#: Text in place of an interval for which there is too little data.
NO_INTERVAL = "[?]"
_TINY = 1e-4  #: smaller numbers are written with an exponent
_DECIMALS = 6  #: largest number of decimals of a number that is not tiny
_CERTAIN = 4  #: digits of a number without an interval


def visible(text: str, *, lines: bool = False) -> str:
    """Return the text with symbols in place of invisible characters and those that control a terminal or directions."""
    return "".join(char if lines and char in "\n\t" else _visible(char) for char in text)


def escape(text: str, *, lines: bool = False) -> str:
    """Return text for HTML: markup is escaped, and controls are shown as symbols; `lines` keeps the line breaks."""
    return html.escape(_INVALID_IN_XML.sub("\ufffd", visible(text, lines=lines)))


def token_text(token: str) -> str:
    """Return a token as `visible` text, with symbols for spaces at its ends; ``(empty)`` for an empty token."""
    shown = visible(token)
    inner = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    after = len(shown) - len(inner) - before
    return f"{_SPACE * before}{inner}{_SPACE * after}" or "(empty)"


def _visible(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return _NEWLINE
    if code < ord(" "):
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "␡"
    hidden = unicodedata.category(char) in _HIDDEN and char not in _JOINERS
    return f"⟨U+{code:04X}⟩" if hidden or code & 0xFFFF in _NONCHARACTERS else char


def layer_pattern(name: str) -> str:
    """Return a tensor or module name with ``*`` for its layer and expert numbers, so one row can stand for all."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def split_layer(name: str) -> tuple[int, str]:
    """Return the layer number in a tensor or module name, and the name after it; layer 0 for a name without one."""
    match = re.search(r"(?:^|\.)(\d+)\.(?=.)", name)
    return (int(match[1]), name[match.end() :]) if match else (0, name)


def name_in_layer(name: str) -> str:
    """Return the part of a module name after its layer number, with ``*`` for the number of the expert."""
    return layer_pattern(split_layer(name)[1])


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last parts of each path, as many as needed to tell the paths apart, as `visible` text."""
    parts_by_path = [[part for part in path.split("/") if part] or [path] for path in paths]
    for count in range(1, max(map(len, parts_by_path), default=0) + 1):
        names = ["/".join(parts[-count:]) for parts in parts_by_path]
        if len(set(names)) == len(set(paths)):
            return [visible(name) for name in names]
    return [visible(path) for path in paths]


def size_text(nbytes: float) -> str:
    """Return a number of bytes in the unit that fits: ``512 B``, ``3.5 KiB``, ``1,023.25 MiB``, ``14.96 GiB``."""
    if nbytes < _KIBI:
        return f"{nbytes:.0f} B"
    if nbytes < _KIBI**2:
        return f"{nbytes / _KIBI:.1f} KiB"
    if nbytes < _KIBI**3 * 10:
        return f"{nbytes / _KIBI**2:,.2f} MiB"
    return f"{nbytes / _KIBI**3:,.2f} GiB"


def decimal_size(nbytes: float) -> str:
    """Return a number of bytes in decimal units, as on data sheets: ``80.00 GB``."""
    for name, unit in _DECIMAL_UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes:.0f} B"


def shape_text(shapes: set[tuple[int, ...]]) -> str:
    return "x".join(map(str, next(iter(shapes)))) if len(shapes) == 1 else "various"


def format_number(value: float) -> str:
    """Return a number as short text (``0.25``, ``1,200``, ``3e-7``), or a dash if it is not finite."""
    if not math.isfinite(value):
        return "-"
    if value == 0 or _TINY <= abs(value) < 10**6:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def number(value: float, digits: int = _CERTAIN) -> str:
    """Return a number with `digits` significant digits; Inf is ``∞`` and NaN is ``-``."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if abs(value) < _TINY or abs(value) >= 10**6:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{max(digits - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def short(value: float) -> str:
    """Return a number without trailing zeros: at most four significant digits."""
    return format_number(float(f"{value:.{_CERTAIN}g}")) if math.isfinite(value) else number(value)


def percent(value: float) -> str:
    """Return a fraction that a person chose in percent, without trailing zeros."""
    return f"{short(100 * value)}%" if math.isfinite(value) else number(value)


def change(value: float, decimals: int = 2) -> str:
    """Return a relative change in percent, with its sign."""
    return f"{value:+.{decimals}%}" if math.isfinite(value) else number(value)


def fraction(value: float | None) -> str:
    """Return a fraction that may be tiny; 0 if it is zero, and nothing if it was not measured."""
    return "" if value is None else f"{value:.1e}" if value else "0"


def times(ratio: float | None, missing: str = "-") -> str:
    """Return how many times as much: ``2.00x``."""
    return missing if ratio is None else f"{ratio:.2f}x"


def whole_percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def span(values: Iterable[float | None], form: Callable[[float], str] = short) -> str:
    """Return the least and the largest value as text; one number if both texts are equal, a dash if all are None."""
    present = [value for value in values if value is not None]
    if not present:
        return "-"
    least, largest = form(min(present)), form(max(present))
    return least if least == largest else f"{least} .. {largest}"


def interval(
    value: float, low: float, high: float, *, as_percent: bool = False, signed: bool = False, digits: int = 2
) -> Pair:
    """Return a value with its interval: ``+0.31% [0.12, 0.50]``; the width of the interval decides the digits."""
    values = [100 * end if as_percent else end for end in (value, low, high)]
    reach = (values[2] - values[1]) / 2
    if not math.isfinite(values[0]):
        return Pair(number(values[0]), NO_INTERVAL)
    known = math.isfinite(reach)
    if known and reach > 0:
        texts = [_to_digits(end, values[0], reach, digits) for end in values]
    else:
        texts = [short(end) for end in values]
    sign = "+" if signed and values[0] > 0 else ""
    unit = "%" if as_percent else ""
    return Pair(f"{sign}{texts[0]}{unit}", f"[{texts[1]}, {texts[2]}]" if known else NO_INTERVAL)


def _to_digits(value: float, middle: float, reach: float, digits: int) -> str:
    """Return a value with the decimals that `digits` significant digits of `reach`, half the width, have."""
    if abs(middle) + reach < _TINY:
        return number(value, 3)
    decimals = digits - 1 - math.floor(math.log10(reach * 1.05))  # 0.0999 counts as 0.1
    return f"{value:,.{min(max(decimals, 0), _DECIMALS)}f}"


def brief(value: Any) -> str:
    """Return a JSON value in one line; of a SHA-256 hash, the beginning."""
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {brief(item)}" for key, item in value.items()) + ")"
    if isinstance(value, list | tuple):
        return ", ".join(map(brief, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value)
    text = str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{64}", text) else text
