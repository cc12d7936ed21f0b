"""Pieces of grammars in llguidance's Lark: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: White space as `json.dumps` writes it: if any amount is allowed, a weak model may write nothing else.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Any text; it holds no special token.
TEXT = r"/(.|\n)*/"


def literal(text: str, tokens: Mapping[str, int] | None = None) -> str:
    """Return the expression of a text, in which some texts are single tokens."""
    if not tokens:
        return json.dumps(text) if text else ""
    marks = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    pieces = re.split(f"({marks})", text)
    return " ".join(f"<[{tokens[piece]}]>" if piece in tokens else json.dumps(piece) for piece in pieces if piece)


def one_of(*bodies: str) -> str:
    """Return the expression of alternatives, of which one may be empty."""
    return f"({' | '.join(filter(None, bodies))}){'' if all(bodies) else '?'}"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the expression of JSON that follows a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def pattern(text: str) -> str:
    """Return the terminal of a regular expression."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"\\.|/|\n", lambda found: escapes.get(found[0], found[0]), text, flags=re.DOTALL)
    return f"/{escaped}/"


class Rules:
    """The rules of a grammar, and other grammars that they refer to."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._own: set[str] = set()

    def add(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        """Return the name of a rule with this body, or of a terminal; equal ones are one."""
        known = f"{options}: {body}"
        if known not in self._names:
            self._names[known] = f"{'T' if terminal else 'r'}{len(self._names)}"
            self._rules.append(f"{self._names[known]}{known}")
        return self._names[known]

    def named(self, name: str, body: str) -> None:
        """Add a rule with a name of its own, once; it may refer to itself."""
        if name not in self._own:
            self._own.add(name)
            self._rules.append(f"{name}: {body}")

    def until(self, text: str, tokens: Mapping[str, int] | None = None) -> str:
        """Return the expression of any text up to another, and that."""
        places = [place for token in tokens or () if (place := text.find(token)) >= 0]
        if places:  # no token is in a text, so the first one ends it; what stands before it goes with the text
            return f"{self.add(TEXT)} {literal(text[min(places) :], tokens)}"
        return self.add(rf"/(.|\n)*{pattern(re.escape(text))[1:]}", "[lazy]")

    def other(self, source: str) -> str:
        """Return the expression of a whole grammar."""
        grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
        name = f"other{len(self._others)}"
        self._others += [grammars[0] | {"name": name}, *grammars[1:]]
        return f"@{name}"

    def source(self, start: str) -> str:
        """Return the grammar whose texts follow an expression."""
        text = "\n".join((f"start: {start}", *self._rules))
        return json.dumps({"grammars": [{"lark_grammar": text}, *self._others]})
