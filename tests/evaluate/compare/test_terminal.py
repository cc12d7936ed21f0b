from __future__ import annotations

import io
import math

from comparisons import (
    full_candidate,
    hostile_comparison,
    judged_candidate,
    make_candidate,
    make_comparison,
    make_summary,
)
from rich.console import Console

from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.result import Comparison
from minifloat.report import terminal


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
    assert "tokens would decide" in undecided


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


def test_an_interrupted_run_is_marked() -> None:
    assert any(line.startswith("PARTIAL: ") for line in printed_lines(make_comparison(tokens_done=12_000)))
    assert not any("PARTIAL" in line for line in printed_lines(make_comparison()))


def test_missing_measurements_are_named_before_the_verdict() -> None:
    lines = printed_lines(make_comparison(notes=("a: [keys] are not rounded",)))
    assert lines[-2] == "Not measured: a: [keys] are not rounded"


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
    assert len(lines) - len(printed_lines(make_comparison())) < 12


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
