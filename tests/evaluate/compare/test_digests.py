"""A comparison on the model card, rendered as hubs render it, and on a terminal."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

from comparisons import (
    full_candidate,
    hostile_comparison,
    judged_candidate,
    make_candidate,
    make_comparison,
    make_summary,
)
from markdown_it import MarkdownIt
from rich.console import Console

from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.result import Comparison
from minifloat.report import markdown, terminal

# ------------------------------------------------------------------------------------------------- the card


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
    assert tables(section)[2][1] == [
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


def test_hostile_text_breaks_no_table_and_adds_no_markup() -> None:
    section = card_section(hostile_comparison())
    html = render(section)
    assert not re.search(r"<(script|a|img|em|code)\b", html.replace("<pre><code>", ""))
    for table in tables(section):
        assert len({len(row) for row in table}) == 1
    assert sum(line in (BEGIN, END) for line in section.splitlines()) == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", section)
    section.encode()


# ------------------------------------------------------------------------------------------------- a terminal


def printed_lines(comparison: Comparison) -> list[str]:
    """Return the lines printed on a terminal of 100 columns."""
    file = io.StringIO()
    terminal.write(document(comparison), Console(width=100, highlight=False, file=file))
    return file.getvalue().splitlines()


def test_a_row_per_text_and_one_for_all_with_compact_intervals() -> None:
    lines = printed_lines(make_comparison())
    first = next(index for index, line in enumerate(lines) if line.startswith("text "))
    assert [line.split("  ")[0] for line in lines[first + 1 : first + 4]] == ["prose.txt", "code.txt", "all texts"]
    assert lines[first + 1].split(maxsplit=1)[1].split("  ") == [
        "12,345", "8.38 -> 8.40", "+0.27% [0.17, 0.37]", "0.0040 [0.0036, 0.0044]", "98.0% [97.9, 98.1]",
    ]  # fmt: skip


def test_the_verdict_is_the_last_line() -> None:
    assert printed_lines(make_comparison())[-1].startswith("storybook-fp8-block: PASSED: every bound is kept")
    assert printed_lines(make_comparison(make_candidate(damage=4)))[-1].startswith(
        "storybook-fp8-block: FAILED: same top-1"
    )
    undecided = printed_lines(make_comparison(make_candidate(damage=2.6)))[-1]
    assert "NOT ENOUGH DATA" in undecided
    assert "more tokens of fresh text would decide" in undecided


def test_every_broken_bound_is_named() -> None:
    candidate = make_candidate(damage=10)
    lines = printed_lines(make_comparison(candidate))
    for check in candidate.verdict.unmet:
        assert any(
            check.quantity in line and check.text in line and (" is allowed" in line or " is wanted" in line)
            for line in lines
        )


def test_each_candidate_has_a_table_and_a_verdict() -> None:
    lines = printed_lines(make_comparison(make_candidate("out/a"), make_candidate("out/b", 10)))
    assert sum(line.startswith("text ") for line in lines) == 2
    assert [line.split(":")[0] for line in lines if "PASSED" in line or "FAILED" in line] == ["a", "b"]
    assert "storybook -> a: 18.00 MiB -> 9.00 MiB (2.00x smaller)" in lines


def test_an_interrupted_run_and_missing_measurements_are_marked_before_the_verdict() -> None:
    comparison = make_comparison(tokens_done=12_000, notes=("a: [keys] * are not rounded",))
    lines = printed_lines(comparison)
    assert lines[-3] == "Not measured: a: [keys] * are not rounded"
    assert lines[-2].startswith("PARTIAL: ")
    assert not any("PARTIAL" in line for line in printed_lines(make_comparison()))
    section = card_section(comparison)
    assert "**PARTIAL: the run was interrupted" in section
    assert "- **Not measured**\n  - a: [keys] &#42; are not rounded\n" in section


def test_the_other_measurements_take_a_few_lines() -> None:
    lines = printed_lines(make_comparison(full_candidate()))
    for start in (
        "generation: 3 of 10 prompts (30% [6, 54])",
        "task gsm8k, exact_match,strict-match: 62.4% ± 1.3 -> 61.1% ± 1.4, difference -1.3 pp [-2.4, -0.2]",
        "damage: 16 of 16 modules",
        "  model.layers.0.mlp.down_proj: SQNR 24.0 dB, KL alone 0.00400",
        r"  --override 'model\.layers\.0\.mlp\.down_proj=bf16'",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert len(lines) - len(printed_lines(make_comparison())) <= 15


def test_the_table_fits_into_100_columns_and_cuts_no_number() -> None:
    name = "a-text-with-quite-a-long-name.jsonl"
    texts = (name, "b.txt")
    lines = printed_lines(make_comparison(make_candidate(texts=texts), texts=()))
    table = lines[1 : next(index for index, line in enumerate(lines) if line.startswith("KL median"))]
    assert all(len(line.rstrip()) <= 100 for line in table)
    assert not any("…" in line for line in table)
    assert "".join(line[:9].split("  ")[0].strip() for line in table[1:]).startswith(name[:9])
    assert sum("[" in line for line in table) == 3


def test_a_text_too_short_for_an_interval_is_explained() -> None:
    summary = make_summary(kl_mean=Estimate(0.004, math.nan, math.nan))
    lines = printed_lines(make_comparison(judged_candidate(summary)))
    assert any("0.004 [?]" in line for line in lines)
    assert any("fewer than 8 documents or windows" in line for line in lines)
    assert not any("fewer than" in line for line in printed_lines(make_comparison()))


def test_hostile_names_move_no_cursor_and_are_no_markup() -> None:
    output = "\n".join(printed_lines(hostile_comparison()))
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "[x](y)␛[31m" in output.replace("\n", "")
