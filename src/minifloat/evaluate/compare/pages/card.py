"""The evaluation section of a model card (README.md): a comparison in Markdown, between two marker comments.

Hubs render the file as HTML, and its tables contain names of texts and tokens of models. `markdown` replaces every
character that could begin markup by a numeric reference, which Markdown never interprets as structure.

Left out: metadata in the card's head (``model-index``). It cannot hold intervals and verdicts, and the numbers without
them would spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    machine_facts,
    note_lines,
    override_options,
    partial_text,
    size_lines,
    suggestion_text,
    tolerance_text,
    unmet_lines,
    verdict_line,
)
from minifloat.evaluate.compare.result import CandidateResult, Comparison, WorstToken
from minifloat.evaluate.compare.summary import Summary
from minifloat.evaluate.compare.tasks import TaskDifference
from minifloat.report.card import markdown, markers
from minifloat.report.text import token_text, visible

BEGIN, END = markers("compare")
_WORST, _CONTEXT, _TOKEN = 5, 40, 40


def card_section(comparison: Comparison) -> str:
    """Return the evaluation section of a comparison as Markdown, including its markers.

    Several candidates share the tables. The only quoted text is that of the five tokens that differ most.
    """
    names = [markdown(name) for name in candidate_names(comparison)]
    pairs = list(zip(names, comparison.candidates, strict=True))
    partial = partial_text(comparison)
    lines = [
        BEGIN,
        "## Evaluation: is it still the same model?",
        "",
        f"Compared with {markdown(baseline_name(comparison))} on the same tokens.",
        "",
        *([f"**{partial}**", ""] if partial else []),
        *_verdicts(pairs),
        *(f"- Not measured: {markdown(note)}" for note in note_lines(comparison)),
        "",
        f"The bounds, on every text: {tolerance_text(comparison.candidates[0].verdict.tolerance)}.",
        markdown(confidence_text()),
        "",
        *_numbers(pairs),
        *_late(pairs),
        *_tasks(pairs),
        *_generation_and_attribution(pairs),
        *_worst(pairs),
        *_provenance(comparison, pairs),
        END,
    ]
    return "\n".join(lines) + "\n"


_Pairs = Sequence[tuple[str, CandidateResult]]


def _verdicts(pairs: _Pairs) -> Iterator[str]:
    for name, candidate in pairs:
        yield f"- **{name}: {markdown(verdict_line(candidate))}**"
        lines = unmet_lines(candidate)
        if len(lines) > 1:
            yield from (f"  - {markdown(line)}" for line in lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose cells are Markdown already, and an empty line."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _labelled(pairs: _Pairs, text: str, name: str) -> str:
    return text if len(pairs) == 1 else f"{text}: {name}"


def _numbers(pairs: _Pairs) -> list[str]:
    columns = (
        "text",
        "tokens",
        "perplexity",
        "change",
        "bits per byte",
        "mean KL",
        "KL p99",
        "same top-1",
        "top-10",
    )
    rows = [
        [_labelled(pairs, markdown(candidate.summaries[place].name), name), *_row(candidate.summaries[place])]
        for place in range(len(pairs[0][1].summaries))
        for name, candidate in pairs
    ]
    return _table(columns, rows)


def _row(summary: Summary) -> list[str]:
    return [
        f"{summary.tokens:,}",
        f"{number(summary.baseline_perplexity)} -> {number(summary.candidate_perplexity)}",
        with_interval(increase(summary), as_percent=True, signed=True),
        f"{number(summary.baseline_bits_per_byte)} -> {number(summary.candidate_bits_per_byte)}",
        with_interval(summary.kl_mean),
        with_interval(summary.kl_p99),
        with_interval(summary.same_top1, as_percent=True),
        with_interval(summary.topk_overlap, as_percent=True),
    ]


def _late(pairs: _Pairs) -> Iterator[str]:
    """Yield a sentence on late positions for each candidate that ran over long windows."""
    for name, candidate in pairs:
        positions = candidate.overall.positions
        if positions is not None and positions.late is not None:
            label = f"{name}: " if len(pairs) > 1 else ""
            yield from (f"{label}{markdown(late_text(positions.late))}.", "")


def _tasks(pairs: _Pairs) -> list[str]:
    rows = [
        [_labelled(pairs, markdown(task.task), name), *_task(task)]
        for name, candidate in pairs
        for task in candidate.tasks
    ]
    columns = ("task", "metric", "items", "baseline", "candidate", "difference", "McNemar's p", "recovery")
    return _table(columns, rows) if rows else []


def _task(task: TaskDifference) -> list[str]:
    return [
        markdown(task.metric),
        f"{task.items:,}",
        task_score(task, task.baseline),
        task_score(task, task.candidate),
        task_difference(task),
        "-" if task.mcnemar_p is None else number(task.mcnemar_p, 2),
        recovery(task),
    ]


def _generation_and_attribution(pairs: _Pairs) -> Iterator[str]:
    """Yield a sentence on generation and one on attribution for each candidate that has them."""
    for name, candidate in pairs:
        label = f"{name}: " if len(pairs) > 1 else ""
        if candidate.generation is not None:
            yield from (f"{label}Greedy generation: {generation_text(candidate.generation)}.", "")
        if candidate.attribution is not None and candidate.attribution.suggestion is not None:
            suggestion = candidate.attribution.suggestion
            yield f"{label}{suggestion_text(suggestion)} ({attribution_text(candidate.attribution)})."
            yield from (f"minifloat quantize takes {markdown(option)}." for option in override_options(suggestion))
            yield ""


def _worst(pairs: _Pairs) -> list[str]:
    rows = [
        [_labelled(pairs, number(worst.kl, 3), name), *_worst_cells(worst)]
        for name, candidate in pairs
        for worst in candidate.worst[:_WORST]
    ]
    columns = ("KL", "after", "came", "baseline expected", "candidate expected")
    return ["The tokens that differ most:", "", *_table(columns, rows)] if rows else []


def _worst_cells(worst: WorstToken) -> list[str]:
    first_choices = [
        f"{_token(tokens[0].token)} ({tokens[0].probability:.0%})" if tokens else "-"
        for tokens in (worst.baseline, worst.candidate)
    ]
    context = visible(worst.context)
    before = f"…{context[-_CONTEXT:]}" if len(context) > _CONTEXT else context
    return [markdown(before), _token(worst.token), *first_choices]


def _token(token: str) -> str:
    return markdown(token_text(token)[:_TOKEN])


def _provenance(comparison: Comparison, pairs: _Pairs) -> Iterator[str]:
    for name, candidate in pairs:
        formats = markdown(formats_text(candidate.model))
        yield f"- {name}: {markdown(size_lines(comparison, candidate))}; {formats}"
    for text in comparison.texts:
        yield (
            f"- {markdown(text.name)}: {text.documents:,} documents, {text.tokens:,} tokens, "
            f"sha256 {markdown(text.sha256[:16])}"
        )
    machine = ", ".join(f"{name} {value}" for name, value in machine_facts(comparison.machine))
    yield f"- windows of {comparison.window} tokens, in {markdown(comparison.dtype)}; {markdown(machine)}"
    yield ""
    if comparison.command:
        yield from ("Made by", "", f"    {visible(comparison.command)}", "")
