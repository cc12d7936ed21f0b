from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifloat.report.svg import escape
from minifloat.report.text import short_names, size_text, token_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, naïve, 中文, 😀", "plain, naïve, 中文, 😀"),
        ("a\nb\tc\r", "a↵b␉c␍"),
        ("\x1b[31m\x00\x7f", "␛[31m␀␡"),
        ("\u202eabc\u2066", "⟨U+202E⟩abc⟨U+2066⟩"),
        ("\ud800\ufffe\u2028\x85", "⟨U+D800⟩⟨U+FFFE⟩⟨U+2028⟩⟨U+0085⟩"),
        ("क\u094d\u200dष", "क\u094d\u200dष"),
    ],
)
def test_invisible_characters_become_symbols(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_line_breaks_and_tabs_can_be_kept() -> None:
    assert visible("a\n\tb\r\x1b", lines=True) == "a\n\tb␍␛"


@given(st.text(st.characters()))
def test_no_control_character_is_left(text: str) -> None:
    shown = visible(text)
    assert not {unicodedata.category(char) for char in shown if char not in "\u200c\u200d"} & {
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    }
    assert "\ufffd" not in escape(shown) or "\ufffd" in text
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("token", "shown"), [(" the ", "␣the␣"), ("  ", "␣␣"), ("", "(empty)"), ("a b", "a b"), ("\n", "↵")]
)
def test_spaces_at_the_ends_of_a_token_become_symbols(token: str, shown: str) -> None:
    assert token_text(token) == shown


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/models/a"], ["a"]),
        (["/models/a", "/models/b"], ["a", "b"]),
        (["/x/a", "/y/a", "/y/b"], ["x/a", "y/a", "y/b"]),
        (["a", "a (without FP8 inputs)"], ["a", "a (without FP8 inputs)"]),
        (["a", "a"], ["a", "a"]),
        (["", "/"], ["", "/"]),
        ([], []),
    ],
)
def test_names_are_as_short_as_possible_while_they_differ(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.00 MiB"),
        (16060 << 20, "15.68 GiB"),
    ],
)
def test_sizes_are_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
