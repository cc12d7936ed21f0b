"""The HTML page of a comparison: its sections, numbers and charts, and hostile input."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pages
import pytest
from comparisons import (
    HOSTILE,
    around,
    full_candidate,
    hostile_comparison,
    judged_candidate,
    make_attribution,
    make_candidate,
    make_comparison,
    make_generation,
    make_summary,
    make_worst,
)
from pages import captions, loads_nothing, parse, rows, text_of

from minifloat.evaluate.compare.attribution import Suggestion
from minifloat.evaluate.compare.document import SAME, document
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import Comparison
from minifloat.evaluate.compare.verdict import judge
from minifloat.evaluate.compare.words import suggestion_text
from minifloat.report import html
from minifloat.report.document import Figure, Section


def compare_page(comparison: Comparison, *, drawn: bool = False) -> str:
    """Return the page; drawing its charts takes a second."""
    with nullcontext() if drawn else mock.patch("minifloat.report.figures.draw", return_value="<svg/>"):
        return html.write(document(comparison))


def sections(comparison: Comparison) -> dict[str, ElementTree.Element]:
    return pages.sections(compare_page(comparison))


def boxes(section: ElementTree.Element) -> list[tuple[str, str]]:
    return [(box.get("class", ""), text_of(box)) for box in section.iter("div") if "box" in box.get("class", "")]


def chart_of(comparison: Comparison, title: str) -> Any:
    """Return the data of the first chart of a section."""
    (section,) = (block for block in document(comparison).blocks if isinstance(block, Section) and block.title == title)
    return next(block.chart for block in section.blocks if isinstance(block, Figure))


@pytest.fixture
def suggestion() -> Suggestion:
    found = make_attribution().suggestion
    assert found is not None
    return found


# The verdict


def test_the_verdict_comes_first() -> None:
    assert next(iter(sections(make_comparison()))) == SAME


VERDICTS = {
    "passed: PASSED: every bound is kept on every text; on all texts: perplexity increase +0.30% [0.19, 0.41]": (
        make_candidate()
    ),
    "failed: FAILED: 2 of 9 bounds are broken same top-1 90.00% [89.50, 90.50] on code.txt (at least 92% is wanted)": (
        make_candidate(damage=4)
    ),
    "undecided: NOT ENOUGH DATA: perplexity increase +0.76% [0.31, 1.21] on prose.txt (at most 1% is allowed, 1.1% "
    "with the margin): the bound lies in the interval; the value lies 0.24 percentage points below it, half the "
    "interval is 0.45 wide; about 9,500 more tokens of fresh text would decide": judged_candidate(
        make_summary(perplexity_ratio=around(1.0076, 0.0045))
    ),
    "passed: PASSED: every bound is kept on prose.txt, 2 of 3 within a margin of 10% of the allowed loss: mean KL "
    "0.0201 [0.0191, 0.0211] on prose.txt (at most 0.02 is allowed, 0.022 with the margin)": (
        judged_candidate(make_summary(kl_mean=around(0.0201, 0.001), same_top1=around(0.92, 0.005)))
    ),
    "failed: FAILED: mean KL 0.050 [0.040, 0.060] on prose.txt (at most 0.02 is allowed)": (
        judged_candidate(make_summary(kl_mean=around(0.05, 0.01)))
    ),
    "undecided: NOT ENOUGH DATA: mean KL 0.004 [?] on prose.txt (at most 0.02 is allowed): too few documents": (
        judged_candidate(make_summary(kl_mean=Estimate(0.004, math.nan, math.nan)))
    ),
    "failed: FAILED: perplexity increase ∞ [?]": (
        judged_candidate(make_summary(perplexity_ratio=Estimate(math.inf, math.nan, math.nan)))
    ),
}


@pytest.mark.parametrize("said", VERDICTS)
def test_a_verdict_comes_with_its_reasons(said: str) -> None:
    section = sections(make_comparison(VERDICTS[said]))[SAME]
    ((kind, text),) = boxes(section)
    assert f"{kind.removeprefix('box ')}: {text.removeprefix('storybook-fp8-block: ')}".startswith(said)
    assert "the interval may end beyond it by at most 10% of the loss that it allows" in text_of(section)
    assert "prose.txt" not in text or "of 9 bounds" not in text


def test_an_undecided_verdict_says_how_many_tokens_would_decide() -> None:
    candidate = make_candidate(damage=2.75)
    needed = [(check.tokens_needed or 0) - check.tokens for check in candidate.verdict.unmet]
    ((kind, text),) = boxes(sections(make_comparison(candidate))[SAME])
    assert kind == "box undecided"
    assert "NOT ENOUGH DATA: 2 of 9 bounds are undecided" in text
    assert min(needed) > 0
    for more in needed:
        said = [int(found.replace(",", "")) for found in re.findall(r"about ([\d,]+) more tokens of fresh text", text)]
        assert any(more <= count < 1.1 * more for count in said)


def test_more_text_than_anybody_scores_is_not_asked_for() -> None:
    candidate = judged_candidate(make_summary(perplexity_ratio=around(1.0105, 0.0095)))
    ((_, text),) = boxes(sections(make_comparison(candidate))[SAME])
    assert (candidate.verdict.unmet[0].tokens_needed or 0) > 2_000_000
    assert "no practical amount of text would decide, because it would take more than 1,000,000 tokens" in text
    assert "more tokens of fresh text" not in text


def test_an_interrupted_run_is_marked_before_the_verdict() -> None:
    (kind, text), *others = boxes(sections(make_comparison(tokens_done=12_000))[SAME])
    assert kind == "box warning"
    assert "PARTIAL: the run was interrupted after 12,000 of 24,690 tokens (49%)" in text
    assert len(others) == 1
    assert "PARTIAL" not in compare_page(make_comparison())


def test_several_candidates_are_compared_side_by_side() -> None:
    comparison = make_comparison(make_candidate("out/a", 1), make_candidate("out/b", 10), make_candidate("out/c", 2.6))
    found = sections(comparison)
    assert [kind for kind, _ in boxes(found[SAME])] == ["box passed", "box failed", "box undecided"]
    overview = rows(found[SAME])
    assert [row[0] for row in overview] == ["storybook", "a", "b", "c"]
    assert [row[-1] for row in overview] == ["baseline", "passed", "failed", "not enough data"]
    table = rows(found["Perplexity"])
    assert [row[0] for row in table] == [
        "prose.txt", "a", "b", "c", "code.txt", "a", "b", "c", "all texts", "a", "b", "c",
    ]  # fmt: skip
    chart = chart_of(comparison, "Perplexity")
    assert (list(chart.names), chart.mark) == (["a", "b", "c"], (0.01, "bound 1%"))


def test_failed_measurements_are_listed() -> None:
    *_, (kind, text) = boxes(sections(make_comparison(notes=("models/a: keys are not rounded",)))[SAME])
    assert kind == "box warning"
    assert text == "Not measured models/a: keys are not rounded"


# The numbers


def test_every_text_has_its_numbers_with_intervals() -> None:
    found = sections(make_comparison())
    assert rows(found["Perplexity"])[1] == [
        "code.txt", "12,345 64 documents", "8.375", "8.403", "+0.34% [0.21, 0.46]", "0.9123", "0.9135",
    ]  # fmt: skip
    assert rows(found["KL divergence"])[0] == [
        "prose.txt", "0.00400 [0.00360, 0.00440]", "0.00133 [0.00123, 0.00143]", "0.0600 [0.0520, 0.0680]",
        "0.240 [0.200, 0.280]", "0.800",
    ]  # fmt: skip
    assert rows(found["Same top-1"])[2] == [
            "all texts", "97.80% [97.69, 97.91]", "98.68% [98.57, 98.79]",
        ]  # fmt: skip


def test_the_overview_has_bytes_and_how_many_times_smaller() -> None:
    baseline, candidate = rows(sections(make_comparison())[SAME])
    assert baseline[:2] == ["storybook", "18.00 MiB"]
    assert candidate[:3] == ["storybook-fp8-block", "9.00 MiB 2.00x smaller", "8.400"]


def test_every_chart_has_a_title() -> None:
    page = compare_page(make_comparison(full_candidate()), drawn=True)
    assert loads_nothing(page)
    root = parse(page)
    charts = list(root.iter("{http://www.w3.org/2000/svg}svg"))
    assert len(charts) == 9
    assert all(chart.get("aria-label") and chart.get("role") == "img" for chart in charts)


def test_the_margins_have_their_token_counts_and_empty_bins_are_left_out() -> None:
    candidate = make_candidate()
    first, *others = candidate.overall.margins
    margins = (replace(first, tokens=0, same_top1=math.nan, kl_mean=math.nan), *others)
    candidate = replace(candidate, overall=replace(candidate.overall, margins=margins))
    labels = [label for label, _ in chart_of(make_comparison(candidate), "Same top-1").rows]
    assert "0.1 to 0.25 nats (3,086 tokens)" in labels
    assert "above 8 nats (3,086 tokens)" in labels
    assert not any(label.startswith("0 to 0.1") for label in labels)


def test_models_settings_and_machine_are_listed() -> None:
    section = sections(make_comparison())["What was run"]
    names, values = ([text_of(element) for element in section.iter(tag)] for tag in ("dt", "dd"))
    assert dict(zip(names, values, strict=True)) == {
        "baseline": "models/storybook: 18,874,368 bytes, run by transformers' code: inputs of the linears in BF16",
        "candidate": (
            "models/storybook-fp8-block: 9,437,184 bytes, run by transformers' code: inputs of the linears "
            "in E4M3 per token (dynamic)"
        ),
        "windows": "256 tokens, in bfloat16",
        "tokens": "24,690, scored in 12.3 s",
        "date": "2025-11-22",
        "minifloat": "0.1.0",
        "torch": "2.13.0",
        "threads": "2",
    }
    assert rows(section)[0] == ["prose.txt", "64", "12,345", "ab" * 8]
    assert text_of(next(section.iter("pre"))) == "minifloat compare models/storybook models/storybook-fp8-block"


# Parts that may be missing


def test_parts_that_were_not_measured_are_left_out() -> None:
    always = [SAME, "Perplexity", "KL divergence", "Same top-1"]
    assert list(sections(make_comparison(replace(make_candidate(), worst=())))) == [*always, "What was run"]
    assert list(sections(make_comparison(full_candidate()))) == [
        *always, "Tools and schemas", "Tasks", "Greedy generation", "Where the damage comes from",
        "Where they differ most", "What was run",
    ]  # fmt: skip


def test_a_model_against_itself_needs_no_kl_chart() -> None:
    found = sections(make_comparison(make_candidate(damage=0)))
    assert boxes(found[SAME])[0][0] == "box passed"
    assert captions(found["KL divergence"]) == []
    assert rows(found["KL divergence"])[0][1:] == ["0 [0, 0]"] * 4 + ["0"]


def test_the_kl_curve_falls_and_ends_where_it_would_stand_for_less_than_one_token() -> None:
    def points(tokens: int) -> list[tuple[float, float]]:
        summary = make_summary(tokens=tokens)
        candidate = replace(make_candidate(), texts=(summary,), overall=summary)
        points: list[tuple[float, float]] = chart_of(make_comparison(candidate), "KL divergence").series[0].points
        return points

    many = points(100_000)
    assert len(many) == len(make_summary().kl_curve)
    assert len(points(2_500)) == len(many) - 1
    assert [kl for kl, _ in many] == sorted(kl for kl, _ in many)
    assert [share for _, share in many] == sorted((share for _, share in many), reverse=True)


def test_tasks_have_difference_interval_and_p() -> None:
    strict, _, perplexity = rows(sections(make_comparison(full_candidate()))["Tasks"])
    assert strict == [
        "gsm8k, exact_match,strict-match, 5 examples", "1,319", "62.4% ± 1.3", "61.1% ± 1.4", "-1.3 pp [-2.4, -0.2]",
        "97.9%", "40 : 57 p 0.10",
    ]  # fmt: skip
    assert perplexity[2:5] == ["12.10", "12.20", "+0.1 [?]"]


def test_samples_mark_the_text_after_the_first_difference() -> None:
    section = sections(make_comparison(replace(make_candidate(), generation=make_generation())))["Greedy generation"]
    passages = [part for part in section.iter("p") if part.get("class") == "written"]
    marks = [["".join(mark.itertext()) for mark in part.iter("mark")] for part in passages]
    assert marks[:3] == [[], ["in the park.\n\nOne day, she saw"], ["with her toys.\nOne day,"]]
    assert marks[-3:] == [[], [], []]
    assert "they part at token 3" in text_of(section)
    assert "the same to the end" in text_of(section)


def test_the_curve_of_generation_falls_where_continuations_diverge() -> None:
    candidate = replace(make_candidate(), generation=make_generation())
    shares = [share for _, share in chart_of(make_comparison(candidate), "Greedy generation").series[0].points]
    assert shares == sorted(shares, reverse=True)
    assert [shares[0], shares[-1]] == pytest.approx([1.0, 0.3])


def test_attribution_shows_the_modules_and_the_override_options() -> None:
    section = sections(make_comparison(full_candidate()))["Where the damage comes from"]
    text = text_of(section)
    assert "16 of 16 modules were measured alone, on 4,096 tokens" in text
    assert "Leaving 1 module unquantized costs 256.0 KiB and brings the mean KL from 0.0400 to 0.0120" in text
    assert r"--override 'model\.layers\.0\.mlp\.down_proj=bf16'" in text
    assert rows(section)[0] == ["model.layers.0.mlp.down_proj", "24.00", "0.00400", "0.00400", "256.0 KiB"]


def test_an_attribution_without_kl_shows_only_the_sqnr() -> None:
    candidate = replace(make_candidate(), attribution=make_attribution(measured=False))
    section = sections(make_comparison(candidate))["Where the damage comes from"]
    assert captions(section) == ["SQNR of a module's output, by layer"]
    assert rows(section)[0][2:4] == ["-", "-"]


def test_a_suggestion_that_keeps_everything_shows_no_override(suggestion: Suggestion) -> None:
    everything = replace(make_attribution(), suggestion=replace(suggestion, everything=True))
    text = text_of(
        sections(make_comparison(replace(make_candidate(), attribution=everything)))["Where the damage comes from"]
    )
    assert "another scheme is the better answer" in text
    assert "--override" not in text


def test_the_worst_tokens_are_shown_in_context_with_both_models_choices() -> None:
    section = sections(make_comparison())["Where they differ most"]
    assert "KL 3.20 nats; prose.txt, document 3, token 512" in text_of(section)
    assert text_of(next(section.iter("mark"))) == "␣dragon"
    assert [row[1:3] for row in rows(section)] == [
        ["␣dragon", "61.0%"], ["␣cat", "20.0%"], ["␣dog", "10.0%"], ["↵", "3.0%"], ["!", "0.2%"],
    ]  # fmt: skip
    assert rows(section)[0][3:] == ["␣cat", "61.0%"]


def test_many_worst_tokens_are_folded() -> None:
    candidate = replace(make_candidate(), worst=tuple(make_worst(kl=9.0 - index) for index in range(9)))
    section = sections(make_comparison(candidate))["Where they differ most"]
    (folded,) = section.iter("details")
    assert text_of(folded).startswith("4 more")
    assert (len(list(folded.iter("mark"))), len(list(section.iter("mark")))) == (4, 9)


# Hostile and degenerate input


def test_hostile_text_is_shown_as_text() -> None:
    page = compare_page(hostile_comparison(), drawn=True)
    page.encode()
    assert loads_nothing(page)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page)
    assert "<script>|`*_[x](y)␛[31m⟨U+202E⟩⟨U+D800⟩␀</td>" in text_of(parse(page))


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_and_infinite_numbers_make_a_page_without_nan(value: float) -> None:
    broken = Estimate(value, math.nan, math.nan)
    summary = make_summary(
        units=1,
        candidate_perplexity=value,
        perplexity_ratio=broken,
        candidate_bits_per_byte=value,
        kl_mean=broken,
        kl_p99=broken,
        kl_max=value,
        kl_curve=((0.5, value), (0.9, value)),
    )
    page = compare_page(make_comparison(judged_candidate(summary, full_candidate())), drawn=True)
    parse(page)
    assert not re.search(r"\b(nan|inf|None)\b", page)


def test_equal_comparisons_give_equal_pages() -> None:
    assert compare_page(make_comparison(full_candidate())) == compare_page(make_comparison(full_candidate()))


def test_a_long_token_is_cut() -> None:
    candidate = replace(make_candidate(), worst=(make_worst("x" * 500, "y" * 5000),))
    page = compare_page(make_comparison(candidate))
    assert "x" * 41 not in page
    assert "y" * 241 not in page


def test_the_hostile_text_of_these_tests_is_hostile() -> None:
    with pytest.raises(ElementTree.ParseError):
        ElementTree.fromstring(f"<p>{HOSTILE.replace(chr(0xD800), '')}</p>")


def test_a_suggestion_promises_nothing_beyond_the_sample_that_it_was_measured_on(suggestion: Suggestion) -> None:
    text = suggestion_text(replace(suggestion, reaches=True, everything=False, tokens=2_000))
    assert "to +0.80% on the 2,000 tokens of the sample: inside the tolerance there, without an interval" in text
    assert text.endswith("It is no verdict on all texts: quantize with these options and compare")


@pytest.mark.parametrize(
    ("kl", "said"),
    [
        (
            around(0.01, 0.002),
            "it is inside the tolerance; on prose.txt: perplexity increase +0.27% [0.17, 0.37], mean KL ",
        ),
        (around(0.025, 0.002), "it is outside of the tolerance: mean KL 0.0250 [0.0230, 0.0270] on prose.txt (at most"),
        (around(0.019, 0.004), "it is not decided: mean KL 0.0190 [0.0150, 0.0230] on prose.txt (at most 0.02 is"),
    ],
)
def test_a_suggestion_that_was_measured_on_all_texts_comes_with_that_verdict(
    suggestion: Suggestion, kl: Estimate, said: str
) -> None:
    text = suggestion_text(replace(suggestion, verdict=judge([make_summary(kl_mean=kl)], Tolerance())))
    assert f"Measured on every text, {said}" in text
    assert "without an interval" not in text


def test_a_search_that_the_time_ended_does_not_say_that_only_its_choice_is_enough(
    suggestion: Suggestion,
) -> None:
    everything = replace(suggestion, everything=True)
    assert "only with every module" in suggestion_text(everything)
    text = suggestion_text(replace(everything, finished=False))
    assert "only" not in text
    assert "the time was up before fewer modules were tried (--attribute-seconds)" in text
    text = suggestion_text(replace(everything, reaches=False))
    assert "outside of the tolerance even with every module unquantized" in text
