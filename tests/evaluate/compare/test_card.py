"""The evaluation section of the model card, rendered as hubs render it."""

from __future__ import annotations

import re
from dataclasses import replace

from comparisons import full_candidate, hostile_comparison, make_candidate, make_comparison
from markdown_it import MarkdownIt

from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.result import Comparison
from minifloat.report import markdown

BEGIN, END = markdown.markers("compare")


def card_section(comparison: Comparison) -> str:
    return markdown.write_section("compare", document(comparison))


def render(text: str) -> str:
    """Render Markdown as hubs do: with tables, and with HTML passed through."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each rendered table, without markup."""
    rendered = re.findall(r"<table>.*?</table>", render(text), re.DOTALL)
    return [
        [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        ]
        for table in rendered
    ]


def test_the_section_stands_between_its_markers() -> None:
    lines = card_section(make_comparison(full_candidate())).splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    assert lines.count(BEGIN) == lines.count(END) == 1


def test_the_verdict_comes_before_the_numbers() -> None:
    section = card_section(make_comparison(make_candidate(damage=4)))
    verdict = section.index("- **storybook-fp8-block: FAILED: ")
    assert verdict < section.index("| text |")
    assert "same top-1 90.00% [89.50, 90.50] on code.txt (at least 92% is wanted)" in section[verdict:]


def test_every_text_has_a_row_with_intervals() -> None:
    head, *rows = tables(card_section(make_comparison()))[0]
    assert head[:4] == ["text", "tokens", "perplexity", "change"]
    assert [row[0] for row in rows] == ["prose.txt", "code.txt", "all texts"]
    assert rows[0][1:6] == [
        "12,345", "8.375 -&gt; 8.398", "+0.27% [0.17, 0.37]", "0.9123 -&gt; 0.9133", "0.00400 [0.00360, 0.00440]",
    ]  # fmt: skip


def test_several_candidates_share_the_tables() -> None:
    section = card_section(make_comparison(make_candidate("out/a"), make_candidate("out/b", 10)))
    assert [row[0] for row in tables(section)[0][1:3]] == ["prose.txt: a", "prose.txt: b"]
    assert "- **a: PASSED" in section
    assert "- **b: FAILED" in section


def test_tasks_generation_and_suggestion_are_shown_if_they_were_measured() -> None:
    section = card_section(make_comparison(full_candidate()))
    assert tables(section)[1][1] == [
        "gsm8k, exact_match,strict-match, 5 examples", "1,319", "62.4% ± 1.3", "61.1% ± 1.4", "-1.3 pp [-2.4, -0.2]",
        "97.9%", "40 : 57 p 0.10",
    ]  # fmt: skip
    assert "## Greedy generation\n\n- 3 of 10 prompts" in section
    assert "--override 'model\\.layers\\.0\\.mlp\\.down_proj=bf16'" in section
    bare = card_section(make_comparison(replace(make_candidate(), worst=())))
    assert [table[0][0] for table in tables(bare)] == ["text", "text"]  # the numbers, and what was run
    assert "Greedy" not in bare


def test_command_versions_and_date_are_shown() -> None:
    section = card_section(make_comparison())
    assert "```\nminifloat compare models/storybook models/storybook-fp8-block\n```\n" in section
    assert "- date: 2025-11-22\n- minifloat: 0.1.0\n- torch: 2.13.0\n- threads: 2\n" in section
    assert "None" not in section


def test_an_interrupted_run_is_marked() -> None:
    assert "**PARTIAL: the run was interrupted" in card_section(make_comparison(tokens_done=12_000))


def test_failed_measurements_are_listed() -> None:
    assert "- **Not measured**\n  - a: keys &#42; values\n" in card_section(
        make_comparison(notes=("a: keys * values",))
    )


def test_hostile_text_breaks_no_table_and_adds_no_markup() -> None:
    section = card_section(hostile_comparison())
    html = render(section)
    assert not re.search(r"<(script|a|img|em|code)\b", html.replace("<pre><code>", ""))
    for table in tables(section):
        assert len({len(row) for row in table}) == 1
    assert sum(line in (BEGIN, END) for line in section.splitlines()) == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", section)
    section.encode()
