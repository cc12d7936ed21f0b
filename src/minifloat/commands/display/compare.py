"""Prints the report of `compare`, with the texts of the HTML page (`compare.pages.words`)."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from minifloat.commands.display.console import make_console, make_table
from minifloat.evaluate.compare.pages.numbers import increase, number, with_interval
from minifloat.evaluate.compare.pages.tasks import recovery, task_difference, task_score
from minifloat.evaluate.compare.pages.words import (
    attribution_text,
    baseline_name,
    candidate_names,
    confidence_text,
    formats_text,
    generation_text,
    late_text,
    note_lines,
    override_options,
    partial_text,
    position_label,
    size_lines,
    suggestion_text,
    unmet_lines,
    verdict_line,
)
from minifloat.evaluate.compare.positions import Positions
from minifloat.evaluate.compare.result import CandidateResult, Comparison
from minifloat.evaluate.compare.summary import Summary
from minifloat.report.text import visible

_WORST_MODULES = 3
_MIN_NAME_COLUMNS = 9  #: characters of the column of names


def print_comparison(comparison: Comparison) -> None:
    """Print a table of texts and the other measurements of each candidate, then the verdicts."""
    console = make_console()
    names = candidate_names(comparison)
    for name, candidate in zip(names, comparison.candidates, strict=True):
        console.print(
            escape(f"{baseline_name(comparison)} -> {name}: {size_lines(comparison, candidate)}"), soft_wrap=True
        )
        console.print(_table(candidate))
        if candidate.overall.positions is not None:
            console.print(_positions_table(candidate.overall.positions))
        for line in _lines(candidate):
            console.print(escape(line), soft_wrap=True)
        console.print()
    if any(not row.kl_mean.known for candidate in comparison.candidates for row in candidate.summaries):
        console.print(escape(confidence_text()), soft_wrap=True)
    for note in note_lines(comparison):
        console.print(escape(f"Not measured: {note}"), soft_wrap=True)
    if comparison.partial:
        console.print(escape(partial_text(comparison)), soft_wrap=True)
    for name, candidate in zip(names, comparison.candidates, strict=True):
        others = unmet_lines(candidate)[1:]
        for line in reversed(others):
            console.print(escape(f"  {line}"), soft_wrap=True)
        console.print(escape(f"{name}: {verdict_line(candidate)}"), soft_wrap=True)


def _table(candidate: CandidateResult) -> Table:
    """Return the table of texts. On a narrow terminal names are folded, numbers never."""
    kl = "KL, nats" if candidate.model.served is None else "KL at least"
    numbers = ("tokens", "perplexity", "change", kl, "same top-1")
    table = make_table("text", *numbers, right=numbers)
    names = table.columns[0]
    names.no_wrap, names.overflow, names.min_width = False, "fold", _MIN_NAME_COLUMNS
    for summary in candidate.summaries:
        table.add_row(escape(visible(summary.name)), *map(escape, _cells(summary)))
    return table


def _positions_table(positions: Positions) -> Table:
    """Return the table of ranges of positions, on all texts together."""
    table = make_table("positions", "tokens", "KL, nats", right=("positions", "tokens", "KL, nats"))
    for row in positions.ranges:
        table.add_row(position_label(row), f"{row.tokens:,}", escape(with_interval(row.kl_mean, digits=1)))
    return table


def _cells(summary: Summary) -> list[str]:
    return [
        f"{summary.tokens:,}",
        f"{number(summary.baseline_perplexity, 3)} -> {number(summary.candidate_perplexity, 3)}",
        with_interval(increase(summary), as_percent=True, signed=True),
        with_interval(summary.kl_mean, digits=1),
        with_interval(summary.same_top1, as_percent=True, digits=1),
    ]


def _lines(candidate: CandidateResult) -> Iterator[str]:
    overall = candidate.overall
    if overall.positions is not None and overall.positions.late is not None:
        yield late_text(overall.positions.late)
    yield (
        f"KL median {number(overall.kl_median.value, 3)}, p99 {number(overall.kl_p99.value, 3)}, "
        f"p99.9 {number(overall.kl_p999.value, 3)}, max {number(overall.kl_max, 3)}; top-10 overlap "
        f"{with_interval(overall.topk_overlap, as_percent=True)}; bits per byte "
        f"{number(overall.baseline_bits_per_byte)} -> {number(overall.candidate_bits_per_byte)}"
    )
    yield formats_text(candidate.model)
    if candidate.generation is not None:
        yield f"generation: {generation_text(candidate.generation)}"
    for task in candidate.tasks:
        scores = [task_score(task, score) for score in (task.baseline, task.candidate)]
        p = "" if task.mcnemar_p is None else f", McNemar's p {number(task.mcnemar_p, 2)}"
        yield (
            f"task {visible(task.task)}, {visible(task.metric)}: {scores[0]} -> {scores[1]}, difference "
            f"{task_difference(task)}{p}, {task.items:,} items, recovery {recovery(task)}"
        )
    if candidate.attribution is not None:
        yield f"damage: {attribution_text(candidate.attribution)}"
        for row in candidate.attribution.rows[:_WORST_MODULES]:
            alone = "" if row.kl_alone is None else f", KL alone {number(row.kl_alone, 3)}"
            yield f"  {visible(row.module)}: SQNR {number(row.sqnr_db, 3)} dB{alone}"
        if candidate.attribution.suggestion is not None:
            yield f"  {suggestion_text(candidate.attribution.suggestion)}"
            yield from (f"  {option}" for option in override_options(candidate.attribution.suggestion))
