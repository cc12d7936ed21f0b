"""Grammars of regular expressions, choices, Lark, GBNF and structures inside any text."""

from __future__ import annotations

import llguidance
import pytest

from minifloat.engine import Grammar
from minifloat.errors import UsageError

_TAGS = Grammar.structural_tag(
    ["<f"], [("<f=a>", {"type": "integer"}, "</f>"), ("<f=b>", {"type": "array", "items": {"const": 1}}, "</f>")]
)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (Grammar.regex(r"[0-9]{3}/[a-z]+"), ["123/ab"], ["123", "x123/ab", "123/ab "]),
        (Grammar.regex("a\nb|é"), ["a\nb", "é"], ["anb"]),
        (Grammar.choice(['yes "sir"', "no", "no\n"]), ['yes "sir"', "no", "no\n"], ["yes", ""]),
        (Grammar.lark('start: "a"+ NUMBER\nNUMBER: /[0-9]/'), ["aa1"], ["a", "1"]),
        (Grammar.lark('root ::= "a" item*\nitem ::= [0-9] | "b"'), ["a", "a1b"], ["b"]),
        (_TAGS, ["", "so <f=a>12</f> and <f=b>[1, 1]</f> <", "<g"], ["<f", "<f=a>x</f>", "<f=c>", "<f=b>[2]</f>"]),
    ],
)  # fmt: skip
def test_texts_that_follow_a_grammar(grammar: Grammar, accepted: list[str], refused: list[str]) -> None:
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("(a"), "^regex: .*unclosed group"),
        (lambda: Grammar.regex("(?=a)b"), "^regex: .*look-ahead"),
        (lambda: Grammar.regex(""), "^regex: expected 1 to 65536 characters"),
        (lambda: Grammar.regex("a" * 70_000), "^regex: expected 1 to 65536 characters, got 70000"),
        (lambda: Grammar.choice([]), "^choice: expected texts"),
        (lambda: Grammar.choice(["a", ""]), "^choice: .*none of them empty"),
        (lambda: Grammar.lark("start: missing"), "^grammar: .*missing"),
        (lambda: Grammar.lark('root ::= ('), "^grammar: "),
        (lambda: Grammar.structural_tag(["<f"], [("<g>", {}, "")]), "^structural_tag: no structure begins"),
        (lambda: Grammar.structural_tag(["<f"], [("<f>", {}, ""), ("<g>", {}, "")]), "^structural_tag: .* none of the"),
        (lambda: Grammar.structural_tag([""], [("<f>", {}, "")]), "^structural_tag: no structure begins"),
        (lambda: Grammar.structural_tag(["<"], [("<f>", {"not": {}}, "")]), "^structural_tag: .*not"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused_by_its_field(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=message):
        make()


def test_a_panic_of_llguidance_is_an_error_of_the_grammar() -> None:
    """llguidance cuts the schema that its error shows after 100 bytes, and panics inside a character."""
    for padding in range(4):
        grammar = Grammar.json_schema({"required": {"x" * padding + "é🌸" * 30: 1}})
        with pytest.raises(UsageError, match=r"^tools: "):
            grammar.check("tools")
