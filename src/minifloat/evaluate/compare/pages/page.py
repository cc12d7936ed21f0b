"""A comparison as an HTML page for the person who decides whether to ship the quantized model.

The models side by side and the verdict come first. The report beside a checkpoint takes its sections from here too.

The page shows one candidate, or several side by side. Parts that were not measured are left out. The sentences come
from `minifloat.evaluate.compare.pages.words`, which the terminal and the model card share. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.pages.charts import (
    change_chart,
    kl_chart,
    layer_charts,
    margin_chart,
    module_chart,
    position_chart,
    size_chart,
    survival_chart,
)
from minifloat.evaluate.compare.pages.examples import greedy_samples, worst_tokens
from minifloat.evaluate.compare.pages.numbers import increase, interval_parts, number
from minifloat.evaluate.compare.pages.tasks import tasks_section
from minifloat.evaluate.compare.pages.words import (
    OUTCOMES,
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
    position_label,
    smaller,
    suggestion_text,
    tolerance_text,
    unmet_lines,
    verdict_count,
    verdict_line,
    weights_text,
)
from minifloat.evaluate.compare.result import CandidateResult, Comparison, ModelRecord
from minifloat.evaluate.compare.summary import Summary
from minifloat.evaluate.compare.verdict import Outcome
from minifloat.report.page import (
    Cell,
    Markup,
    box,
    bullets,
    code,
    facts,
    folded,
    page,
    paragraph,
    section,
    stacked,
    subsection,
    table,
)
from minifloat.report.text import size_text, visible

_KINDS = {Outcome.PASSED: "passed", Outcome.FAILED: "failed", Outcome.UNDECIDED: "undecided"}


def compare_page(comparison: Comparison) -> str:
    """Return a self-contained HTML page about a comparison."""
    names = candidate_names(comparison)
    title = names[0] if len(names) == 1 else f"{len(names)} candidates"
    return page(
        f"Is it still the same model? {title} against {baseline_name(comparison)}",
        verdict_section(comparison, "Verdict"),
        *detail_sections(comparison),
    )


def detail_sections(comparison: Comparison) -> list[str]:
    """Return the sections after the verdict; a section of what was not measured is an empty string."""
    names = candidate_names(comparison)
    return [
        _perplexity(comparison, names),
        _divergence(comparison, names),
        _positions(comparison, names),
        _same_top1(comparison, names),
        tasks_section([(name, candidate.tasks) for name, candidate in zip(names, comparison.candidates, strict=True)]),
        _generation(comparison, names),
        _damage(comparison, names),
        _worst(comparison, names),
        _run(comparison, names),
    ]


def verdict_section(comparison: Comparison, title: str, others: Sequence[CandidateResult] = ()) -> str:
    """Return the section with the models side by side, and the verdict on each candidate below."""
    names = candidate_names(comparison)
    partial, notes = partial_text(comparison), note_lines(comparison)
    boxes = []
    for name, candidate in zip(names, comparison.candidates, strict=True):
        lines = unmet_lines(candidate)
        line, body = (verdict_count(candidate), bullets(lines)) if len(lines) > 1 else (verdict_line(candidate), "")
        boxes.append(box(_KINDS[candidate.verdict.outcome], f"{name}: {line}", body))
    bounds = tolerance_text(comparison.candidates[0].verdict.tolerance)
    return section(
        title,
        box("warning", partial) if partial else "",
        _overview(comparison, names),
        *boxes,
        box("warning", "Not measured", bullets(notes)) if notes else "",
        paragraph(f"The bounds, on every text: {bounds}. {confidence_text()}"),
        size_chart([*comparison.candidates, *others]),
    )


def _overview(comparison: Comparison, names: Sequence[str]) -> str:
    """Return a table with one row per model, on all texts together."""
    columns = ("model", "weights", "perplexity", "change", "mean KL", "same top-1", "verdict")
    first = comparison.candidates[0].overall
    base: list[Cell] = [baseline_name(comparison), weights_text(comparison.baseline)]
    rows = [[*base, number(first.baseline_perplexity), "", "", "", "baseline"]]
    for name, candidate in zip(names, comparison.candidates, strict=True):
        rows.append(
            [
                name,
                stacked(weights_text(candidate.model), smaller(comparison, candidate)),
                number(candidate.overall.candidate_perplexity),
                _cell(increase(candidate.overall), as_percent=True, signed=True),
                _cell(candidate.overall.kl_mean),
                _cell(candidate.overall.same_top1, as_percent=True),
                Markup(f'<span class="words">{OUTCOMES[candidate.verdict.outcome].lower()}</span>'),
            ]
        )
    return table(columns, rows)


def _cell(estimate: Estimate, *, as_percent: bool = False, signed: bool = False) -> Markup:
    return stacked(*interval_parts(estimate, as_percent=as_percent, signed=signed))


def _by_text(
    comparison: Comparison, names: Sequence[str], columns: Sequence[str], cells: Callable[[Summary], list[Cell]]
) -> str:
    """Return a table with a row for each candidate on each text."""
    rows: list[list[Cell]] = []
    for place, summary in enumerate(comparison.candidates[0].summaries):
        if len(names) > 1:
            rows.append([visible(summary.name)])
        for name, candidate in zip(names, comparison.candidates, strict=True):
            rows.append([name if len(names) > 1 else visible(summary.name), *cells(candidate.summaries[place])])
    return table(("text" if len(names) == 1 else "candidate", *columns), rows)


def _perplexity(comparison: Comparison, names: Sequence[str]) -> str:
    def cells(summary: Summary) -> list[Cell]:
        return [
            stacked(f"{summary.tokens:,}", f"{summary.units:,} {summary.unit.replace(' or ', 's or ')}s"),
            number(summary.baseline_perplexity),
            number(summary.candidate_perplexity),
            _cell(increase(summary), as_percent=True, signed=True),
            number(summary.baseline_bits_per_byte),
            number(summary.candidate_bits_per_byte),
        ]

    columns = ("tokens", "baseline", "candidate", "change", "baseline bits/byte", "candidate bits/byte")
    chart = change_chart(comparison.candidates, names)
    return section("Perplexity", chart, _by_text(comparison, names, columns, cells))


def _divergence(comparison: Comparison, names: Sequence[str]) -> str:
    def cells(summary: Summary) -> list[Cell]:
        estimates = (summary.kl_mean, summary.kl_median, summary.kl_p99, summary.kl_p999)
        return [*(_cell(estimate) for estimate in estimates), number(summary.kl_max, 3)]

    columns = ("mean", "median", "p99", "p99.9", "max")
    note = (
        "KL divergence of the candidate's next-token distribution from the baseline's, in nats per token: "
        "0 where they are the same."
    )
    rows = _by_text(comparison, names, columns, cells)
    return section("KL divergence", paragraph(note), kl_chart(comparison.candidates, names), rows)


def _positions(comparison: Comparison, names: Sequence[str]) -> str:
    parts = []
    for heading, candidate in zip(_headings(names), comparison.candidates, strict=True):
        positions = candidate.overall.positions
        if positions is not None:
            rows: list[list[Cell]] = [
                [position_label(r), f"{r.tokens:,}", f"{r.units:,}", _cell(r.kl_mean)] for r in positions.ranges
            ]
            text = paragraph(f"{late_text(positions.late)}.") if positions.late is not None else ""
            unit = f"{candidate.overall.unit.replace(' or ', 's or ')}s"
            parts.append(subsection(heading, text, table(("positions", "tokens", unit, "mean KL"), rows)))
    note = (
        "A token's position is the number of tokens before it in its window. Low precision can fail late in long "
        "windows, where a mean over the whole window hides it."
    )
    chart = position_chart(comparison.candidates, names)
    return section("KL divergence by position", paragraph(note), chart, *parts) if parts else ""


def _same_top1(comparison: Comparison, names: Sequence[str]) -> str:
    def cells(summary: Summary) -> list[Cell]:
        return [_cell(e, as_percent=True) for e in (summary.same_top1, summary.topk_overlap)]

    note = (
        "Same top-1 is the share of tokens at which both models have the same most probable token. One that differs "
        "where the baseline hardly preferred its own is no loss; one that differs where it was sure is."
    )
    rows = _by_text(comparison, names, ("same top-1", "of the first ten in common"), cells)
    return section("Same top-1", paragraph(note), rows, margin_chart(comparison.candidates, names))


# ------------------------------------------------------------------------------------------------- what may be missing


def _headings(names: Sequence[str]) -> Sequence[str]:
    """Return the headings of parts that each candidate has for itself; a single candidate needs no heading."""
    return names if len(names) > 1 else [""]


def _generation(comparison: Comparison, names: Sequence[str]) -> str:
    candidates = zip(names, _headings(names), comparison.candidates, strict=True)
    generated = [
        (name, heading, candidate.generation)
        for name, heading, candidate in candidates
        if candidate.generation is not None
    ]
    if not generated:
        return ""
    note = (
        "Both models write what they find the most probable. One token that differs sends them different ways, even "
        "where the two choices were all but equal, so texts that part are not worse for it."
    )
    lines = [f"{heading}{': ' if heading else ''}{generation_text(found)}." for _, heading, found in generated]
    return section(
        "Greedy generation",
        paragraph(note),
        bullets(lines) if len(lines) > 1 else paragraph(lines[0]),
        survival_chart([(name, found) for name, _, found in generated]),
        *(greedy_samples(found, heading) for _, heading, found in generated),
    )


def _damage(comparison: Comparison, names: Sequence[str]) -> str:
    parts = [_candidate_damage(*pair) for pair in zip(_headings(names), comparison.candidates, strict=True)]
    return section("Where the damage comes from", *parts) if any(parts) else ""


def _candidate_damage(heading: str, candidate: CandidateResult) -> str:
    attribution = candidate.attribution
    if attribution is None:
        return ""
    columns = ("module", "SQNR, dB", "KL alone", "KL of all others", "bytes more in BF16")
    rows = [
        [
            visible(row.module),
            number(row.sqnr_db),
            "-" if row.kl_alone is None else number(row.kl_alone, 3),
            "-" if row.kl_without is None else number(row.kl_without, 3),
            size_text(row.extra_bytes),
        ]
        for row in attribution.rows
    ]
    suggestion = attribution.suggestion
    options = override_options(suggestion)
    return subsection(
        heading,
        paragraph(f"{attribution_text(attribution)}."),
        paragraph(f"{suggestion_text(suggestion)}.") if suggestion else "",
        paragraph("What to tell minifloat quantize:") + code("\n".join(options)) if options else "",
        module_chart(attribution, candidate.verdict.tolerance),
        layer_charts(attribution),
        folded("All modules, the worst first", table(columns, rows)),
    )


def _worst(comparison: Comparison, names: Sequence[str]) -> str:
    parts = [
        worst_tokens(candidate, heading)
        for heading, candidate in zip(_headings(names), comparison.candidates, strict=True)
    ]
    note = "The token of the text is marked; below it are the tokens that each model found the most probable there."
    return section("Where they differ most", paragraph(note), *parts) if any(parts) else ""


# ------------------------------------------------------------------------------------------------- what was run


def _run(comparison: Comparison, names: Sequence[str]) -> str:
    columns = ("text", "documents", "tokens", "sha256")
    rows = [
        [visible(text.name), f"{text.documents:,}", f"{text.tokens:,}", f"{text.sha256[:16]}"]
        for text in comparison.texts
    ]
    return section(
        "What was run",
        facts(list(_run_facts(comparison))),
        table(columns, rows),
        code(visible(comparison.command)) if comparison.command else "",
    )


def _run_facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "baseline", _model_text(comparison.baseline)
    for candidate in comparison.candidates:
        yield "candidate", _model_text(candidate.model)
    yield "windows", f"{comparison.window:,} tokens, in {comparison.dtype}"
    share = "" if not comparison.partial else f" of {comparison.tokens_total:,}"
    yield "tokens", f"{comparison.tokens_done:,}{share}, scored in {number(comparison.seconds, 3)} s"
    yield from machine_facts(comparison.machine)


def _model_text(model: ModelRecord) -> str:
    return f"{visible(model.name)}: {_bytes(model)}, {formats_text(model)}"


def _bytes(model: ModelRecord) -> str:
    return "weights of unknown size" if model.nbytes is None else f"{model.nbytes:,} bytes"
