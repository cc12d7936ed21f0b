"""Names, text and sizes as a reader sees them, wherever they are shown: in HTML, in Markdown or on a terminal.

What a model writes, and what a file is called, may hold anything: escape sequences that move a terminal's cursor, marks
that turn the direction of the text after them, letters that cannot be seen. `visible` shows those instead of obeying.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_NEWLINE, _SPACE = "↵", "␣"
_CONTROL_PICTURES, _DELETE = 0x2400, 0x7F
#: Zero-width joiner and non-joiner, which words of many scripts need.
_JOINERS = "\u200c\u200d"
#: Controls, what has no glyph, halves of surrogate pairs, separators of lines and paragraphs.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NONCHARACTERS = frozenset({0xFFFE, 0xFFFF})
_KIBI = 1 << 10


def visible(text: str, *, lines: bool = False) -> str:
    """Text of which every character can be seen, and none does anything else.

    Args:
        text: Anything.
        lines: Leave line breaks and tabs as they are; otherwise they are shown too, and the text is one line.
    """
    return "".join(char if lines and char in "\n\t" else _visible(char) for char in text)


def token_text(token: str) -> str:
    """A token of a model: `visible`, with the spaces that it begins or ends with; a name for one that is empty."""
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
    """A name with its layer and expert numbers as ``*``: one row stands for all layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def short_names(paths: Sequence[str]) -> list[str]:
    """The last parts of paths, as many as it takes to tell them apart; `visible`."""
    parts = [[part for part in path.split("/") if part] or [path] for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(set(paths)):
            return [visible(name) for name in names]
    return [visible(path) for path in paths]


def size_text(nbytes: float) -> str:
    """Bytes in the unit that fits: ``3.5 KiB``, ``1,023.25 MiB``, ``14.96 GiB``."""
    if nbytes < _KIBI**2:
        return f"{nbytes / _KIBI:.1f} KiB"
    if nbytes < _KIBI**3 * 10:
        return f"{nbytes / _KIBI**2:,.2f} MiB"
    return f"{nbytes / _KIBI**3:,.2f} GiB"
