"""One document on a terminal, as a page and on a card: what appears where, and that no text has an effect."""

from __future__ import annotations

import html as escapes
import re
import unicodedata

import pytest
from markdown_it import MarkdownIt
from pages import loads_nothing, parse, rows, sections, text_of
from rich.console import Console

from minifloat.report import html, markdown, terminal
from minifloat.report.document import (
    Alert,
    Block,
    Bullets,
    Code,
    Column,
    Document,
    Facts,
    Folded,
    On,
    Pair,
    Passage,
    Table,
    Text,
    columns,
    section,
)

HOSTILE = "<script>[x](y)|`\x1b[31m$\\alpha$\u202e&amp;\x00\ud800"


def printed(capsys: pytest.CaptureFixture[str], *blocks: Block, width: int = 100) -> str:
    terminal.write(Document("title", blocks), Console(width=width, highlight=False))
    return capsys.readouterr().out


def table() -> Table:
    heads = columns("text", "tokens", Column("sha256", on=On.PAGE), "mean KL")
    return Table(heads, [["group"], ["a.txt", "1,234", "abc", Pair("0.10", "[0.05, 0.15]")]])


def test_a_table_has_the_columns_of_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, table()).splitlines()
    assert lines[0].split() == ["text", "tokens", "mean", "KL"]
    assert lines[2].split(maxsplit=2) == ["a.txt", "1,234", "0.10 [0.05, 0.15]"]
    page = html.write(Document("title", [section("One", table())]))
    assert rows(sections(page)["One"]) == [["group"], ["a.txt", "1,234", "abc", "0.10 [0.05, 0.15]"]]
    assert markdown.write(Document("title", [table()])) == (
        "| text | tokens | mean KL |\n| --- | --: | --: |\n| group: a.txt | 1,234 | 0.10 [0.05, 0.15] |\n"
    )


def test_a_block_appears_where_it_is_meant_to(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        section("Both", Text("terminal", on=On.TERMINAL), Text("page", on=On.PAGE), Text("card", on=On.CARD), None),
        section("Page only", Passage("text"), Folded("more", [Bullets(["item"])]), on=On.PAGE),
        section("Never", Bullets([]), Text("")),
    ]
    assert printed(capsys, *blocks) == "terminal\n"
    page = html.write(Document("title", blocks))
    assert list(sections(page)) == ["Both", "Page only"]
    assert text_of(sections(page)["Both"]) == "Both page"
    assert text_of(sections(page)["Page only"]) == "Page only text more item"
    assert markdown.write(Document("title", blocks)) == "## Both\n\ncard\n"


def test_tables_and_sections_have_an_empty_line_around_them_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    small = Table(columns("a"), [["b"]])
    blocks = [
        section("", small, small, Text("one"), Text("two")),
        section("", Alert("failed", "three", ["four"]), Code("five\nsix")),
    ]
    assert [line.rstrip() for line in printed(capsys, *blocks).splitlines()] == [
        "a", "b", "", "a", "b", "", "one", "two", "", "three", "  four", "    five", "    six",
    ]  # fmt: skip


def test_the_title_of_a_table_stands_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    titled = Table(columns("a"), [["b"]], title="which")
    assert [line.rstrip() for line in printed(capsys, titled).splitlines()] == ["which", "a", "b"]
    assert markdown.write(Document("", [titled])).startswith("which\n\n| a |")
    assert "<p>which</p>\n<table>" in html.write(Document("", [titled]))


def test_a_narrow_terminal_folds_names_and_cuts_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    long = Table(columns("text", "tokens", folds=True), [["a-text-with-quite-a-long-name.jsonl", "1,234,567"]])
    output = printed(capsys, long, width=24)
    assert "…" not in output
    assert "1,234,567" in output


def test_a_card_has_headings_bold_verdicts_facts_and_code() -> None:
    document = Document(
        "title",
        [
            section(
                "Evaluation",
                Alert("failed", "a: FAILED", ["KL too large", "top-1 too small"]),
                section("Run", Facts([("machine", "2 threads")]), Code("serve MODEL", "bash"), Code("compare A B")),
            )
        ],
    )
    assert markdown.write_section("compare", document) == (
        "<!-- minifloat compare: begin -->\n## Evaluation\n\n- **a: FAILED**\n  - KL too large\n  - top-1 too small\n\n"
        "### Run\n\n- machine: 2 threads\n\n```bash\nserve MODEL\n```\n\n```\ncompare A B\n```\n"
        "<!-- minifloat compare: end -->\n"
    )


def hostile_document() -> Document:
    return Document(
        HOSTILE,
        [
            section(
                HOSTILE,
                Text(HOSTILE, "strong"),
                Bullets([HOSTILE]),
                Facts([(HOSTILE, HOSTILE)]),
                Table(columns(HOSTILE, "b"), [[HOSTILE], [HOSTILE, Pair(HOSTILE, HOSTILE)]], title=HOSTILE),
                Alert("warning", HOSTILE, [HOSTILE]),
                Code(HOSTILE),
                Passage(HOSTILE, HOSTILE),
                Folded(HOSTILE, [Text(HOSTILE)]),
            )
        ],
    )


def test_hostile_text_is_escaped_on_a_page() -> None:
    page = html.write(hostile_document())
    assert loads_nothing(page)
    assert "[x](y)|`␛[31m$\\alpha$⟨U+202E⟩&amp;␀" in text_of(parse(page))
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page)
    page.encode()


def test_hostile_text_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, *hostile_document().blocks)
    assert {char for char in output if unicodedata.category(char) in {"Cc", "Cf", "Cs"}} == {"\n"}


def test_hostile_text_adds_no_markup_to_a_card() -> None:
    text = markdown.write(hostile_document())
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert not re.search(r"<(script|a|img)\b", rendered.replace("<pre><code>", ""))
    assert len(re.findall(r"<t[hd]>|<t[hd] ", rendered)) == 4
    text.encode()


@pytest.mark.parametrize(
    "text", [HOSTILE, "a|b", r"a\|b", "[x](javascript:y)", "![i](u)", "<!-- x", "**b**", "_e_", "~~s~~"]
)
def test_escaped_markdown_is_shown_as_it_is(text: str) -> None:
    rendered = MarkdownIt("commonmark", {"html": True}).render(f"begin {markdown.escape(text)} end")
    shown = re.sub(r"</?p>|\n$", "", rendered)
    assert "<" not in shown
    assert escapes.unescape(shown).startswith(f"begin {text[:3]}")


def test_plain_names_stay_readable_in_markdown() -> None:
    assert markdown.escape("gsm8k_train_1000.jsonl [0.1, 0.2] (x)") == "gsm8k_train_1000.jsonl [0.1, 0.2] (x)"
