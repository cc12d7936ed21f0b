from __future__ import annotations

import math
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minifloat.report.text import (
    brief,
    escape,
    format_number,
    interval,
    number,
    short_names,
    size_text,
    span,
    token_text,
    visible,
)


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


@pytest.mark.parametrize(
    ("value", "short", "exact"),
    [
        (0, "0", "0"),
        (0.25, "0.25", "0.2500"),
        (1200, "1,200", "1,200"),
        (3e-7, "3e-7", "3.000e-7"),
        (1e6, "1e6", "1.000e6"),
        (-2.5e9, "-2.5e9", "-2.500e9"),
        (math.nan, "-", "-"),
        (math.inf, "-", "∞"),
    ],
)
def test_numbers_are_short(value: float, short: str, exact: str) -> None:
    assert (format_number(value), number(value)) == (short, exact)


@pytest.mark.parametrize(
    ("ends", "options", "text"),
    [
        ((0.0031, 0.0012, 0.0050), {"as_percent": True, "signed": True}, "+0.31% [0.12, 0.50]"),
        ((8.4, 8.3, 8.5), {"digits": 1}, "8.4 [8.3, 8.5]"),
        ((3.0, 3.0, 3.0), {}, "3 [3, 3]"),
        ((0.004, math.nan, math.nan), {}, "0.004 [?]"),
        ((math.inf, math.nan, math.nan), {}, "∞ [?]"),
        ((1e-6, 0.5e-6, 1.5e-6), {}, "1.00e-6 [5.00e-7, 1.50e-6]"),
    ],
)
def test_the_width_of_an_interval_decides_the_digits(
    ends: tuple[float, float, float], options: dict[str, Any], text: str
) -> None:
    assert str(interval(*ends, **options)) == text


def test_a_span_has_the_ends_that_differ() -> None:
    assert (span([1.0, None, 2.0]), span([1.0, 1.0]), span([None])) == ("1 .. 2", "1", "-")


def test_json_values_become_one_line() -> None:
    assert brief({"a": [1200, 0.5], "sha": "a" * 64, "on": True}) == f"(a 1,200, 0.5000, sha {'a' * 12}…, on True)"
