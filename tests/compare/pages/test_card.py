from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from comparisons import HOSTILE, full_candidate, hostile_comparison, make_candidate, make_comparison
from markdown_it import MarkdownIt

from minifloat.compare.pages.card import BEGIN, END, card_section
from minifloat.errors import CheckpointError, NotACheckpointError, StorageError, UnsafeFileError
from minifloat.report.card import markdown, update_card

SECTION = f"{BEGIN}\nnew\n{END}\n"


def render(text: str) -> str:
    """As hubs do: tables, and HTML in the text is HTML."""
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(text)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table, rendered, without markup."""
    found = re.findall(r"<table>.*?</table>", render(text), re.DOTALL)
    return [
        [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        ]
        for table in found
    ]


# The section


def test_the_section_stands_between_its_markers() -> None:
    lines = card_section(make_comparison(full_candidate())).splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    assert lines.count(BEGIN) == lines.count(END) == 1


def test_the_verdict_comes_before_the_numbers() -> None:
    section = card_section(make_comparison(make_candidate(damage=4)))
    verdict = section.index("- **storybook-fp8-block: FAILED: ")
    assert verdict < section.index("| text |")
    assert "agreement 96.00% [95.50, 96.50] on code.txt (at least 97% is wanted)" in section[verdict:]


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


def test_tasks_generation_and_suggestion_are_told_where_they_are() -> None:
    section = card_section(make_comparison(full_candidate()))
    assert tables(section)[1][1] == [
        "gsm8k", "exact_match,strict-match", "1,319", "62.4% ± 1.3", "61.1% ± 1.4", "-1.3 pp [-2.4, -0.2]", "0.10",
        "97.9%",
    ]  # fmt: skip
    assert "Greedy generation: 3 of 10 prompts" in section
    assert "--override 'model\\.layers\\.0\\.mlp\\.down_proj=bf16'" in re.sub("&#92;", r"\\", section)
    bare = card_section(make_comparison(replace(make_candidate(), worst=())))
    assert len(tables(bare)) == 1
    assert "Greedy" not in bare


def test_command_versions_and_date_are_told() -> None:
    section = card_section(make_comparison())
    assert "\n    minifloat compare models/storybook models/storybook-fp8-block\n" in section
    assert "date 2025-11-22, minifloat 0.1.0, torch 2.13.0, threads 2" in section
    assert "None" not in section


def test_an_interrupted_run_is_marked() -> None:
    assert "**PARTIAL: the run was interrupted" in card_section(make_comparison(tokens_done=12_000))


def test_what_could_not_be_measured_is_told() -> None:
    assert "- Not measured: a: keys &#42; values\n" in card_section(make_comparison(notes=("a: keys * values",)))


def test_hostile_text_breaks_no_table_and_adds_no_markup() -> None:
    section = card_section(hostile_comparison())
    html = render(section)
    assert not re.search(r"<(script|a|img|em|code)\b", html.replace("<pre><code>", ""))
    for table in tables(section):
        assert len({len(row) for row in table}) == 1
    assert sum(line in (BEGIN, END) for line in section.splitlines()) == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", section)
    section.encode()


@pytest.mark.parametrize(
    "text", [HOSTILE, "a|b", r"a\|b", "[x](javascript:y)", "![i](u)", "<!-- x", "**b**", "_e_", "~~s~~"]
)
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    html = render(f"begin {markdown(text)} end")
    shown = re.sub(r"</?p>|\n$", "", html)
    assert "<" not in shown
    unescaped = shown.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    assert "begin " in unescaped
    assert text[:3] in unescaped


def test_plain_names_stay_readable() -> None:
    assert markdown("gsm8k_train_1000.jsonl [0.1, 0.2] (x)") == "gsm8k_train_1000.jsonl [0.1, 0.2] (x)"


# The card


def test_a_card_is_made_where_there_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "a*model"
    folder.mkdir()
    assert update_card(folder, SECTION) == folder / "README.md"
    assert (folder / "README.md").read_text() == f"# a&#42;model\n\n{SECTION}"


@pytest.mark.parametrize(("before", "gap"), [("# card", "\n\n"), ("# card\n", "\n"), ("# card\n\n", ""), ("", "")])
def test_the_section_goes_to_the_end_of_a_card_without_one(tmp_path: Path, before: str, gap: str) -> None:
    (tmp_path / "README.md").write_text(before)
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == before + gap + SECTION


def test_the_section_of_an_earlier_run_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    before, after = b"---\nlicense: mit\n---\n\xff\x00 bytes\r\n \n", b"\n\n## More\n\ttext  \nno end"
    old = f"{BEGIN}\nold\n## x\n\n{END}".encode()
    (tmp_path / "README.md").write_bytes(before.replace(b"\r", b"") + old + after)
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_bytes() == before.replace(b"\r", b"") + SECTION.strip().encode() + after


def test_updating_again_changes_nothing(tmp_path: Path) -> None:
    section = card_section(make_comparison(full_candidate()))
    (tmp_path / "README.md").write_text("# card\n")
    update_card(tmp_path, section)
    once = (tmp_path / "README.md").read_bytes()
    update_card(tmp_path, section)
    assert (tmp_path / "README.md").read_bytes() == once


def test_a_card_with_carriage_returns_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"# card\r\n")
    update_card(tmp_path, SECTION)
    once = (tmp_path / "README.md").read_bytes()
    assert once == ("# card\n\n" + SECTION).replace("\n", "\r\n").encode()
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_bytes() == once


def test_a_marker_within_a_line_is_none(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"see {BEGIN}\n    {END}\n")
    update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == f"see {BEGIN}\n    {END}\n\n{SECTION}"


@pytest.mark.parametrize("text", [f"{BEGIN}\nx\n", f"x\n{END}\n", f"{END}\n{BEGIN}\n", 2 * f"{BEGIN}\n{END}\n"])
def test_markers_that_do_not_pair_are_refused(tmp_path: Path, text: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    with pytest.raises(CheckpointError, match=r"README\.md.*one pair"):
        update_card(tmp_path, SECTION)
    assert card.read_text() == text


def test_the_permissions_of_a_card_stay(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("x")
    card.chmod(0o640)
    update_card(tmp_path, SECTION)
    assert stat.S_IMODE(card.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_write_that_fails_leaves_the_old_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        update_card(tmp_path, SECTION)
    assert (tmp_path / "README.md").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_a_card_elsewhere_is_not_touched(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "notes.md"
    folder.mkdir()
    outside.write_text("mine")
    (folder / "README.md").symlink_to(outside)
    with pytest.raises(UnsafeFileError, match="leaves the folder"):
        update_card(folder, SECTION)
    assert outside.read_text() == "mine"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        update_card(tmp_path / "nowhere", SECTION)
