"""What `compare` says, first of all the verdict. Parts that were not measured are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from minifloat.evaluate.compare import figures, words
from minifloat.evaluate.compare.behavior import AnswerPair, Behavior
from minifloat.evaluate.compare.generation import ContinuationPair, GreedyDivergence
from minifloat.evaluate.compare.result import (
    Attribution,
    CandidateResult,
    Comparison,
    LikelyToken,
    ModelRecord,
    WorstToken,
)
from minifloat.evaluate.compare.summary import Positions, Summary
from minifloat.evaluate.compare.tasks import TaskDifference
from minifloat.evaluate.compare.verdict import Outcome
from minifloat.report import document as doc
from minifloat.report.text import brief, number, size_text, token_text, visible

SAME = "Is it still the same model?"
_WRITTEN = doc.On.PAGE | doc.On.CARD
_KINDS = {Outcome.PASSED: "passed", Outcome.FAILED: "failed", Outcome.UNDECIDED: "undecided"}
_WORST_MODULES = 3  #: modules that a terminal names
_SHOWN = 5  #: tokens that are not folded
_CONTEXT, _CARD_CONTEXT, _TOKEN, _CONTINUATION = 240, 40, 40, 1500  #: largest numbers of characters

_Part = TypeVar("_Part")
#: A column of a table of texts.
_Quantity = tuple[str, Callable[[Summary], doc.Cell]]
_TOKENS: _Quantity = ("tokens", lambda summary: f"{summary.tokens:,}")
_CHANGE: _Quantity = ("change", lambda summary: words.shown(words.increase(summary), as_percent=True, signed=True))
_KL: _Quantity = ("mean KL", lambda summary: words.shown(summary.kl_mean))
_KL_P99: _Quantity = ("KL p99", lambda summary: words.shown(summary.kl_p99))
_TOP1: _Quantity = ("same top-1", lambda summary: words.shown(summary.same_top1, as_percent=True))
_TOP10: _Quantity = ("top-10", lambda summary: words.shown(summary.topk_overlap, as_percent=True))


def document(comparison: Comparison) -> doc.Document:
    baseline, *names = words.model_names(comparison)
    title = names[0] if len(names) == 1 else f"{len(names)} candidates"
    return doc.Document(
        f"{SAME} {title} against {baseline}",
        [
            *(
                _terminal_section(comparison, baseline, *pair)
                for pair in zip(names, comparison.candidates, strict=True)
            ),
            verdict_section(comparison, on=_WRITTEN),
            *detail_sections(comparison),
            _terminal_verdicts(comparison, names),
        ],
    )


def verdict_section(
    comparison: Comparison, others: Sequence[CandidateResult] = (), *, on: doc.On = doc.On.ALL
) -> doc.Section:
    baseline, *names = words.model_names(comparison)
    alerts = []
    for name, candidate in zip(names, comparison.candidates, strict=True):
        lines = words.unmet_lines(candidate)
        line, reasons = (
            (words.verdict_count(candidate), lines) if len(lines) > 1 else (words.verdict_line(candidate), [])
        )
        alerts.append(doc.Alert(_KINDS[candidate.verdict.outcome], f"{name}: {line}", reasons))
    first = comparison.candidates[0]
    bounds = words.tolerance_text(first.verdict.tolerance, behavior=first.behavior is not None)
    partial = words.partial_text(comparison)
    return doc.section(
        SAME,
        doc.Text(f"Compared with {baseline} on the same tokens.", on=doc.On.CARD),
        doc.Alert("warning", partial) if partial else None,
        _overview(comparison, [baseline, *names]),
        *alerts,
        doc.Alert("warning", "Not measured", comparison.notes) if comparison.notes else None,
        doc.Text(f"The bounds, on every text: {bounds}. {words.confidence_text()}", on=_WRITTEN),
        figures.size_chart([*comparison.candidates, *others]),
        on=on,
    )


def _overview(comparison: Comparison, names: Sequence[str]) -> doc.Table:
    first = comparison.candidates[0].overall
    rows: list[list[doc.Cell]] = [
        [
            names[0],
            words.weights_text(comparison.baseline),
            number(first.baseline_perplexity),
            *["", "", ""],
            "baseline",
        ]
    ]
    for name, candidate in zip(names[1:], comparison.candidates, strict=True):
        rows.append(
            [
                name,
                doc.Pair(words.weights_text(candidate.model), words.smaller(comparison, candidate)),
                number(candidate.overall.candidate_perplexity),
                *(cell(candidate.overall) for _, cell in (_CHANGE, _KL, _TOP1)),
                words.OUTCOMES[candidate.verdict.outcome].lower(),
            ]
        )
    heads = ("weights", "perplexity", "change", "mean KL", "same top-1", "verdict")
    return doc.Table(doc.columns("is it the same model?", *heads), rows, on=doc.On.PAGE | doc.On.TERMINAL)


def _terminal_section(comparison: Comparison, baseline: str, name: str, candidate: CandidateResult) -> doc.Section:
    positions, size = candidate.overall.positions, "weights of unknown size"
    if candidate.model.nbytes is not None:
        weights = [words.weights_text(model) for model in (comparison.baseline, candidate.model)]
        size = f"{' -> '.join(weights)} ({words.smaller(comparison, candidate)})"
    return doc.section(
        "",
        _terminal_table(candidate, f"{baseline} -> {name}: {size}"),
        None if positions is None else _position_table(positions),
        doc.Bullets(list(_terminal_lines(candidate))),
        on=doc.On.TERMINAL,
    )


def _terminal_table(candidate: CandidateResult, title: str) -> doc.Table:
    kl = "KL, nats" if candidate.model.served is None else "KL at least"
    quantities: list[_Quantity] = [
        _TOKENS,
        ("perplexity", lambda s: f"{number(s.baseline_perplexity, 3)} -> {number(s.candidate_perplexity, 3)}"),
        _CHANGE,
        (kl, lambda s: words.shown(s.kl_mean, digits=1)),
        ("same top-1", lambda s: words.shown(s.same_top1, as_percent=True, digits=1)),
    ]
    rows = [[s.name, *(cell(s) for _, cell in quantities)] for s in candidate.summaries]
    return doc.Table(doc.columns("text", *(name for name, _ in quantities), folds=True), rows, title)


def _terminal_lines(candidate: CandidateResult) -> Iterator[str]:
    overall = candidate.overall
    if overall.positions is not None and overall.positions.late is not None:
        yield words.late_text(overall.positions.late)
    yield (
        f"KL median {number(overall.kl_median.value, 3)}, p99 {number(overall.kl_p99.value, 3)}, "
        f"p99.9 {number(overall.kl_p999.value, 3)}, max {number(overall.kl_max, 3)}; top-10 overlap "
        f"{words.shown(overall.topk_overlap, as_percent=True)}; bits per byte "
        f"{number(overall.baseline_bits_per_byte)} -> {number(overall.candidate_bits_per_byte)}"
    )
    yield from filter(None, [words.effective_text(candidate.summaries)])
    yield words.formats_text(candidate.model)
    if candidate.generation is not None:
        yield f"generation: {words.generation_text(candidate.generation)}"
    if candidate.behavior is not None:
        first, *others = words.behavior_lines(candidate.behavior)
        yield f"behavior, prompts of {candidate.behavior.source}: {first}"
        yield from (f"  {line}" for line in others)
    for task in candidate.tasks:
        scores = [words.task_score(task, score) for score in (task.baseline, task.candidate)]
        p = "" if task.mcnemar_p is None else f", McNemar's p {number(task.mcnemar_p, 2)}"
        yield (
            f"task {task.task}, {task.metric}: {scores[0]} -> {scores[1]}, difference "
            f"{words.task_difference(task)}{p}, {task.items:,} items, recovery {words.recovery(task)}"
        )
    if candidate.attribution is not None:
        yield f"damage: {words.attribution_text(candidate.attribution)}"
        for row in candidate.attribution.rows[:_WORST_MODULES]:
            alone = "" if row.kl_alone is None else f", KL alone {number(row.kl_alone, 3)}"
            yield f"  {row.module}: SQNR {number(row.sqnr_db, 3)} dB{alone}"
        if candidate.attribution.suggestion is not None:
            yield f"  {words.suggestion_text(candidate.attribution.suggestion)}"
            yield from (f"  {option}" for option in words.override_options(candidate.attribution.suggestion))


def _terminal_verdicts(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    unknown = any(not row.kl_mean.known for candidate in comparison.candidates for row in candidate.summaries)
    lines = [
        *([words.confidence_text()] if unknown else []),
        *(f"Not measured: {note}" for note in comparison.notes),
        *filter(None, [words.partial_text(comparison)]),
    ]
    for name, candidate in zip(names, comparison.candidates, strict=True):
        lines += [f"  {line}" for line in reversed(words.unmet_lines(candidate)[1:])]
        lines.append(f"{name}: {words.verdict_line(candidate)}")
    return doc.section("", doc.Bullets(lines), on=doc.On.TERMINAL)


def detail_sections(comparison: Comparison) -> list[doc.Section]:
    names, candidates = words.model_names(comparison)[1:], comparison.candidates
    every = (_TOKENS, _PERPLEXITIES, _CHANGE, _BITS, _KL, _KL_P99, _TOP1, _TOP10)
    return [
        doc.section("Numbers", _text_table(candidates, names, every), on=doc.On.CARD),
        doc.section(
            "Perplexity",
            figures.change_chart(candidates, names),
            _text_table(candidates, names, _PERPLEXITY),
            on=doc.On.PAGE,
        ),
        doc.section(
            "KL divergence",
            doc.Text(
                "KL divergence of the candidate's next-token distribution from the baseline's, in nats per token: 0 "
                "where they are the same."
            ),
            figures.kl_chart(candidates, names),
            _text_table(candidates, names, _DIVERGENCE),
            on=doc.On.PAGE,
        ),
        _positions(comparison, names),
        doc.section(
            "Same top-1",
            doc.Text(
                "Same top-1 is the share of tokens at which both models have the same most probable token. One that "
                "differs where the baseline hardly preferred its own is no loss; one that differs where it was sure is."
            ),
            _text_table(candidates, names, (_TOP1, ("of the first ten in common", _TOP10[1]))),
            figures.margin_chart(candidates, names),
            on=doc.On.PAGE,
        ),
        _behavior(comparison, names),
        _tasks(comparison, names),
        _generation(comparison, names),
        _damage(comparison, names),
        _worst(comparison, names),
        _run(comparison),
    ]


_PERPLEXITIES: _Quantity = (
    "perplexity",
    lambda summary: f"{number(summary.baseline_perplexity)} -> {number(summary.candidate_perplexity)}",
)
_BITS: _Quantity = (
    "bits per byte",
    lambda summary: f"{number(summary.baseline_bits_per_byte)} -> {number(summary.candidate_bits_per_byte)}",
)
_PERPLEXITY: tuple[_Quantity, ...] = (
    ("tokens", lambda summary: doc.Pair(f"{summary.tokens:,}", f"{summary.units:,} {words.units_name(summary)}")),
    ("baseline", lambda summary: number(summary.baseline_perplexity)),
    ("candidate", lambda summary: number(summary.candidate_perplexity)),
    _CHANGE,
    ("baseline bits/byte", lambda summary: number(summary.baseline_bits_per_byte)),
    ("candidate bits/byte", lambda summary: number(summary.candidate_bits_per_byte)),
)
_DIVERGENCE: tuple[_Quantity, ...] = (
    ("mean", _KL[1]),
    ("median", lambda summary: words.shown(summary.kl_median)),
    ("p99", _KL_P99[1]),
    ("p99.9", lambda summary: words.shown(summary.kl_p999)),
    ("max", lambda summary: number(summary.kl_max, 3)),
)


def _text_table(
    candidates: Sequence[CandidateResult], names: Sequence[str], quantities: Sequence[_Quantity]
) -> doc.Table:
    rows: list[list[doc.Cell]] = []
    for place, summary in enumerate(candidates[0].summaries):
        if len(names) > 1:
            rows.append([summary.name])
        for name, candidate in zip(names, candidates, strict=True):
            cells = [cell(candidate.summaries[place]) for _, cell in quantities]
            rows.append([name if len(names) > 1 else summary.name, *cells])
    return doc.Table(doc.columns("text", *(name for name, _ in quantities)), rows)


def _headed(comparison: Comparison, names: Sequence[str]) -> Iterator[tuple[str, CandidateResult]]:
    """Yield candidates with headings of their parts; a single candidate needs no heading."""
    yield from zip(names if len(names) > 1 else [""], comparison.candidates, strict=True)


def _measured(
    comparison: Comparison, names: Sequence[str], part: Callable[[CandidateResult], _Part | None]
) -> list[tuple[str, str, _Part]]:
    """Return the name and the heading of each candidate of which a part was measured, and that part."""
    headed = zip(names, _headed(comparison, names), strict=True)
    return [(name, heading, found) for name, (heading, each) in headed if (found := part(each)) is not None]


def _positions(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    parts = [
        doc.section(
            heading,
            doc.Text(f"{words.late_text(positions.late)}." if positions.late is not None else ""),
            _position_table(positions, words.units_name(candidate.overall)),
        )
        for heading, candidate in _headed(comparison, names)
        if (positions := candidate.overall.positions) is not None
    ]
    if not parts:
        return doc.section("")
    note = (
        "A token's position is the number of tokens before it in its window. Low precision can fail late in long "
        "windows, where a mean over the whole window hides it."
    )
    chart = figures.position_chart(comparison.candidates, names)
    return doc.section("KL divergence by position", doc.Text(note, on=doc.On.PAGE), chart, *parts, on=_WRITTEN)


def _position_table(positions: Positions, units: str = "units") -> doc.Table:
    rows: list[list[doc.Cell]] = [
        [words.position_label(row), f"{row.tokens:,}", f"{row.units:,}", words.shown(row.kl_mean)]
        for row in positions.ranges
    ]
    return doc.Table(doc.columns("positions", "tokens", doc.Column(units, on=doc.On.PAGE), "mean KL"), rows)


def _behavior(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    found = _measured(comparison, names, lambda candidate: candidate.behavior)
    if not found:
        return doc.section("")
    note = (
        "Both models answer the same prompts freely, without a grammar. An answer is good if it does all that its "
        "prompt states: valid calls of the right functions with the right arguments, or JSON that follows the schema. "
        "How alike the answers are is no part of the verdict."
    )
    return doc.section(
        "Tools and schemas",
        doc.Text(note),
        figures.behavior_chart([(name, behavior) for name, _, behavior in found]),
        *(_behavior_of(heading, behavior) for _, heading, behavior in found),
        on=_WRITTEN,
    )


def _behavior_of(heading: str, behavior: Behavior) -> doc.Section:
    rows: list[list[doc.Cell]] = [
        [
            share.quantity,
            f"{share.prompts:,}",
            f"{share.baseline:,}",
            f"{share.candidate:,}",
            words.share_difference(share),
            f"{share.better} : {share.worse}",
        ]
        for share in behavior.shares
    ]
    heads = ("prompts", "baseline", "candidate", "difference", "better : worse")
    examples = [block for pair in behavior.examples for block in _answers(pair)]
    return doc.section(
        heading,
        doc.Table(doc.columns("", *heads), rows),
        doc.Bullets(words.behavior_lines(behavior)[len(rows) :]),
        doc.Folded("Answers that differ", examples, on=doc.On.PAGE) if examples else None,
    )


def _answers(pair: AnswerPair) -> Iterator[doc.Block]:
    yield doc.Text(f"{pair.prompt}: {pair.change}", "soft")
    yield doc.Passage(_last(visible(pair.question, lines=True), _CONTEXT))
    for model, text in (("baseline", pair.baseline), ("candidate", pair.candidate)):
        yield doc.Text(model, "soft")
        yield doc.Passage(visible(text, lines=True)[:_CONTINUATION])


def _tasks(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    found = [(name, c.tasks) for name, c in zip(names, comparison.candidates, strict=True) if c.tasks]
    by_label: dict[str, list[tuple[str, TaskDifference]]] = {}
    for name, tasks in found:
        for task in tasks:
            shots = f", {task.fewshot} examples" if task.fewshot else ""
            by_label.setdefault(f"{task.task}, {task.metric}{shots}", []).append((name, task))
    if not found:
        return doc.section("")
    rows: list[list[doc.Cell]] = []
    for label, entries in by_label.items():
        if len(found) > 1:
            rows.append([label])
        rows += [[name if len(found) > 1 else label, *_task_cells(task)] for name, task in entries]
    note = (
        "Scores ± standard error. The difference is paired, over the same items; in percentage points (pp) where items "
        "are right or wrong. Recovery: how much of the baseline's score is kept. Better : worse: items that only the "
        "candidate, and only the baseline, gets right; p: McNemar's, small where they are too uneven for chance."
    )
    heads = ("items", "baseline", "candidate", "difference", "recovery", "better : worse")
    chart = figures.task_chart(by_label, [name for name, _ in found])
    return doc.section("Tasks", chart, doc.Table(doc.columns("task", *heads), rows), doc.Text(note), on=_WRITTEN)


def _task_cells(task: TaskDifference) -> list[doc.Cell]:
    p = "" if task.mcnemar_p is None else f"p {number(task.mcnemar_p, 2)}"
    return [
        f"{task.items:,}",
        words.task_score(task, task.baseline),
        words.task_score(task, task.candidate),
        words.task_difference(task),
        words.recovery(task),
        doc.Pair(f"{task.wins} : {task.losses}", p),
    ]


def _generation(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    found = _measured(comparison, names, lambda candidate: candidate.generation)
    if not found:
        return doc.section("")
    note = (
        "Both models write what they find the most probable. One token that differs sends them different ways, even "
        "where the two choices were all but equal, so texts that part are not worse for it."
    )
    lines = [
        f"{heading}{': ' if heading else ''}{words.generation_text(divergence)}." for _, heading, divergence in found
    ]
    return doc.section(
        "Greedy generation",
        doc.Text(note, on=doc.On.PAGE),
        doc.Bullets(lines),
        figures.survival_chart([(name, divergence) for name, _, divergence in found]),
        *(_samples(heading, divergence) for _, heading, divergence in found),
        on=_WRITTEN,
    )


def _samples(heading: str, divergence: GreedyDivergence) -> doc.Section:
    return doc.section(heading, *(block for pair in divergence.samples for block in _sample(pair)), on=doc.On.PAGE)


def _sample(pair: ContinuationPair) -> Iterator[doc.Block]:
    """Yield a prompt and both continuations, marked from the character on at which they part."""
    first, second = (visible(text, lines=True)[:_CONTINUATION] for text in (pair.baseline, pair.candidate))
    common = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    parted = f"they part at token {pair.parted_at}" if pair.parted_at is not None else "the same to the end"
    yield doc.Text(f"Prompt; {parted} of the continuation", "soft")
    yield doc.Passage(_last(visible(pair.prompt), _CONTEXT))
    for model, text in (("baseline", first), ("candidate", second)):
        yield doc.Text(model, "soft")
        yield doc.Passage(text[:common], text[common:])


def _last(text: str, count: int) -> str:
    return f"…{text[-count:]}" if len(text) > count else text


def _damage(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    parts = [
        _candidate_damage(heading, candidate, candidate.attribution)
        for heading, candidate in _headed(comparison, names)
        if candidate.attribution is not None
    ]
    return doc.section("Where the damage comes from", *parts, on=_WRITTEN)


def _candidate_damage(heading: str, candidate: CandidateResult, attribution: Attribution) -> doc.Section:
    rows: list[list[doc.Cell]] = [
        [
            row.module,
            number(row.sqnr_db),
            "-" if row.kl_alone is None else number(row.kl_alone, 3),
            "-" if row.kl_without is None else number(row.kl_without, 3),
            size_text(row.extra_bytes),
        ]
        for row in attribution.rows
    ]
    suggestion = attribution.suggestion
    options = words.override_options(suggestion)
    heads = doc.columns("module", "SQNR, dB", "KL alone", "KL of all others", "bytes more in BF16")
    return doc.section(
        heading,
        doc.Text(f"{words.attribution_text(attribution)}."),
        doc.Text(f"{words.suggestion_text(suggestion)}." if suggestion else ""),
        *((doc.Text("What to tell minifloat quantize:"), doc.Code("\n".join(options))) if options else ()),
        figures.module_chart(attribution, candidate.verdict.tolerance),
        *figures.layer_charts(attribution),
        doc.Folded("All modules, the worst first", [doc.Table(heads, rows)], on=doc.On.PAGE),
    )


def _worst(comparison: Comparison, names: Sequence[str]) -> doc.Section:
    parts: list[doc.Block] = []
    for heading, candidate in _headed(comparison, names):
        cases = [list(_case(worst)) for worst in candidate.worst]
        blocks = [block for case in cases[:_SHOWN] for block in case]
        rest = [block for case in cases[_SHOWN:] for block in case]
        folded = [doc.Folded(f"{len(cases) - _SHOWN} more", rest)] if rest else []
        rows = [_card_cells(worst) for worst in candidate.worst[:_SHOWN]]
        parts += [doc.section(heading, *blocks, *folded, on=doc.On.PAGE)] if cases else []
        heads = doc.columns("KL", "after", "came", "baseline expected", "candidate expected")
        parts += [doc.Table(heads, rows, heading, on=doc.On.CARD)] if rows else []
    note = "The token of the text is marked; below it are the tokens that each model found the most probable there."
    return doc.section("Where they differ most", doc.Text(note, on=doc.On.PAGE) if parts else None, *parts, on=_WRITTEN)


def _case(worst: WorstToken) -> Iterator[doc.Block]:
    yield doc.Text(
        f"KL {number(worst.kl, 3)} nats; {worst.text}, document {worst.document}, token {worst.position}", "soft"
    )
    yield doc.Passage(_last(visible(worst.context), _CONTEXT), _token(worst.token))
    rows: list[list[doc.Cell]] = []
    for place in range(max(len(worst.baseline), len(worst.candidate))):
        cells = [cell for tokens in (worst.baseline, worst.candidate) for cell in _likely(tokens[place : place + 1])]
        rows.append([str(place + 1), *cells])
    if rows:
        yield doc.Table(doc.columns("", "baseline", "probability", "candidate", "probability"), rows)


def _likely(tokens: Sequence[LikelyToken]) -> list[str]:
    return [_token(tokens[0].token), f"{tokens[0].probability:.1%}"] if tokens else ["", ""]


def _token(token: str) -> str:
    found = token_text(token)
    return f"{found[:_TOKEN]}…" if len(found) > _TOKEN else found


def _card_cells(worst: WorstToken) -> list[doc.Cell]:
    choices = [
        f"{_token(tokens[0].token)} ({tokens[0].probability:.0%})" if tokens else "-"
        for tokens in (worst.baseline, worst.candidate)
    ]
    return [number(worst.kl, 3), _last(visible(worst.context), _CARD_CONTEXT), _token(worst.token), *choices]


def _run(comparison: Comparison) -> doc.Section:
    rows = [[text.name, f"{text.documents:,}", f"{text.tokens:,}", text.sha256[:16]] for text in comparison.texts]
    return doc.section(
        "What was run",
        doc.Facts(list(_run_facts(comparison))),
        doc.Table(doc.columns("text", "documents", "tokens", "sha256"), rows),
        doc.Code(comparison.command) if comparison.command else None,
        on=_WRITTEN,
    )


def _run_facts(comparison: Comparison) -> Iterator[tuple[str, str]]:
    yield "baseline", _model_text(comparison.baseline)
    for candidate in comparison.candidates:
        yield "candidate", _model_text(candidate.model)
    yield "windows", f"{comparison.window:,} tokens, in {comparison.dtype}"
    share = "" if not comparison.partial else f" of {comparison.tokens_total:,}"
    yield "tokens", f"{comparison.tokens_done:,}{share}, scored in {number(comparison.seconds, 3)} s"
    for key, value in comparison.machine.items():
        if value is not None:
            yield key.replace("_", " "), value if isinstance(value, str) else brief(value)


def _model_text(model: ModelRecord) -> str:
    size = "weights of unknown size" if model.nbytes is None else f"{model.nbytes:,} bytes"
    return f"{model.name}: {size}, {words.formats_text(model)}"
