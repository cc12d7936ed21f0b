"""Names, text and sizes for readers: in HTML, in Markdown and on a terminal.

The output of a model and the name of a file may hold anything: escape sequences that move a terminal's cursor, marks
that change the direction of the text after them, invisible letters. `visible` shows such characters as symbols, so that
they have no effect.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_NEWLINE, _SPACE = "↵", "␣"
_CONTROL_PICTURES, _DELETE = 0x2400, 0x7F
#: Zero-width joiner and non-joiner: words of many scripts need them, so they stay.
_JOINERS = "\u200c\u200d"
#: Unicode categories: controls, formats, surrogates, separators of lines and paragraphs.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NONCHARACTERS = frozenset({0xFFFE, 0xFFFF})
_KIBI = 1 << 10


def visible(text: str, *, lines: bool = False) -> str:
    """Return the text with symbols in place of invisible characters and characters that control a terminal."""
    return "".join(char if lines and char in "\n\t" else _visible(char) for char in text)


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
