"""The charts of a comparison; a function returns None if there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from minifloat.evaluate.compare.behavior import Behavior
from minifloat.evaluate.compare.generation import GreedyDivergence
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import Attribution, CandidateResult, ModuleDamage
from minifloat.evaluate.compare.tasks import TaskDifference
from minifloat.evaluate.compare.words import increase, position_label, share_difference, shown, task_difference
from minifloat.report.document import Axis, Bar, Bars, Dot, Dots, Figure, Lines, Mark, Point, Scatter, Series
from minifloat.report.text import COLORS, name_in_layer, number, percent, short, short_names, split_layer

_WORST_MODULES = 15
#: About how many points a curve over the tokens of continuations has.
_CURVE_POINTS = 100
#: Smaller fractions of the largest KL divergence are rounding, and would take most of a log axis.
_SMALLEST_SHARE = 1e-7
_MEBI = 1 << 20


def change_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> Figure | None:
    rows = [
        (
            summary.name,
            [
                _dot(change, str(shown(change, as_percent=True, signed=True)))
                for change in (increase(candidate.summaries[place]) for candidate in candidates)
            ],
        )
        for place, summary in enumerate(candidates[0].summaries)
    ]
    bound = candidates[0].verdict.tolerance.max_ppl_increase
    decreases = any(min(dot.value, dot.low) < 0 for _, dots in rows for dot in dots)
    axis = Axis("change of perplexity", percent=True, low=None if decreases else 0.0)
    mark = (bound, f"bound {percent(bound)}")
    return _dots("Change of perplexity with its 95% interval, by text", rows, names, axis, mark)


def _dot(estimate: Estimate, text: str) -> Dot:
    return Dot(estimate.value, text, estimate.low, estimate.high)


def _dots(
    caption: str,
    rows: Sequence[tuple[str, Sequence[Dot]]],
    names: Sequence[str],
    axis: Axis,
    mark: Mark | None = None,
) -> Figure | None:
    if not any(math.isfinite(dot.value) for _, dots in rows for dot in dots):
        return None
    return Figure(caption, Dots(rows, names, axis, mark))


def kl_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> Figure | None:
    if len(candidates) == 1:
        curves = [(summary.name, summary) for summary in candidates[0].summaries]
    else:
        curves = [(name, candidate.overall) for name, candidate in zip(names, candidates, strict=True)]
    largest = max((kl for _, summary in curves for _, kl in summary.kl_curve if math.isfinite(kl)), default=0.0)
    if largest <= 0:
        return None
    series = [
        Series(
            name,
            [
                (kl, 1 - fraction)
                for fraction, kl in summary.kl_curve
                if kl > largest * _SMALLEST_SHARE and (1 - fraction) * summary.tokens >= 1
            ],
        )
        for name, summary in curves
    ]
    x = Axis("KL divergence, nats", log=True)
    y = Axis("share of the tokens above", log=True, percent=True)
    return Figure("Share of the tokens whose KL divergence is larger", Lines(series, x, y))


def size_chart(candidates: Sequence[CandidateResult]) -> Figure | None:
    """Return the bytes of each candidate against its mean KL divergence; None below two candidates."""
    names = short_names([candidate.model.name for candidate in candidates])
    points = [
        Point(name, candidate.model.nbytes / _MEBI, kl.value, kl.low, kl.high)
        for name, candidate in zip(names, candidates, strict=True)
        if candidate.model.nbytes is not None and (kl := candidate.overall.kl_mean).value > 0
    ]
    if len(points) < 2:
        return None
    bound = candidates[0].verdict.tolerance.max_kl
    mark = (bound, f"bound {short(bound)}") if bound > 0 else None
    return Figure(
        "Size against mean KL divergence with its 95% interval; dotted: no candidate is both smaller and nearer",
        Scatter(points, Axis("weights, MiB"), Axis("KL divergence, nats per token", log=True), mark),
    )


def margin_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> Figure | None:
    rows = []
    for place, first in enumerate(candidates[0].overall.margins):
        shares = [candidate.overall.margins[place].same_top1 for candidate in candidates]
        reach = f"{first.low:g} to {first.high:g}" if math.isfinite(first.high) else f"above {first.low:g}"
        if first.tokens:
            rows.append((f"{reach} nats ({first.tokens:,} tokens)", [Dot(share, f"{share:.2%}") for share in shares]))
    caption = "The same first choice, by how sure the baseline was: nats between its first and second choice"
    return _dots(caption, rows, names, Axis("same top-1", percent=True, high=1.0))


def position_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> Figure | None:
    found = [candidate.overall.positions for candidate in candidates]
    rows = []
    for place, first in enumerate(found[0].ranges if found[0] is not None else ()):
        means = [positions.ranges[place].kl_mean for positions in found if positions is not None]
        dots = [_dot(mean, str(shown(mean, digits=1))) for mean in means]
        rows.append((f"{position_label(first)} ({first.tokens:,} tokens)", dots))
    caption = "Mean KL divergence with its 95% interval, by position in the window"
    return _dots(caption, rows, names, Axis("KL divergence, nats per token", low=0.0))


def task_chart(by_label: Mapping[str, Sequence[tuple[str, TaskDifference]]], names: Sequence[str]) -> Figure | None:
    """Return the differences of the tasks whose items are right or wrong, with their intervals."""
    rows = []
    for label, entries in by_label.items():
        tasks = [task for _, task in entries]
        if len(tasks) == len(names) and all(task.mcnemar_p is not None for task in tasks):
            rows.append((label, [_dot(task.difference, str(task_difference(task))) for task in tasks]))
    return _differences("score", rows, names)


def behavior_chart(behaviors: Sequence[tuple[str, Behavior]]) -> Figure | None:
    """Return the differences of the shares of prompts that are answered well, with their intervals."""
    names, found = zip(*behaviors, strict=True)
    rows = [
        (
            f"{shares[0].quantity} ({shares[0].prompts:,})",
            [_dot(share.difference, str(share_difference(share))) for share in shares],
        )
        for shares in zip(*(behavior.shares for behavior in found), strict=True)
    ]
    return _differences("share of the prompts", rows, names)


def _differences(what: str, rows: Sequence[tuple[str, Sequence[Dot]]], names: Sequence[str]) -> Figure | None:
    caption = f"Candidate's {what} less the baseline's, with its 95% interval"
    axis = Axis("difference, percentage points", percent=True)
    return _dots(caption, rows, names, axis, (0.0, "no difference"))


def survival_chart(divergences: Sequence[tuple[str, GreedyDivergence]]) -> Figure:
    series = [Series(name, _survival(divergence)) for name, divergence in divergences]
    x, y = Axis("tokens", whole=True), Axis("share of the prompts", percent=True, low=0.0, high=1.0)
    return Figure("Prompts that both models still continue by the same tokens", Lines(series, x, y, markers=False))


def _survival(divergence: GreedyDivergence) -> list[tuple[float, float]]:
    counts = sorted(
        {*range(0, divergence.new_tokens, max(divergence.new_tokens // _CURVE_POINTS, 1)), divergence.new_tokens}
    )
    lengths = [divergence.new_tokens if first is None else first for first in divergence.first_difference]
    return [(float(count), sum(length >= count for length in lengths) / max(len(lengths), 1)) for count in counts]


def module_chart(attribution: Attribution, tolerance: Tolerance) -> Figure | None:
    bars = [
        Bar(row.module, row.kl_alone, f"{number(row.kl_alone, 2)}; {number(row.sqnr_db, 3)} dB")
        for row in attribution.rows
        if row.kl_alone is not None
    ][:_WORST_MODULES]
    if not bars:
        return None
    bound = tolerance.max_kl
    largest = max(bar.value for bar in bars)
    mark = (bound, f"bound of the whole model {number(bound, 1)}") if largest > bound / 4 else None
    return Figure(
        f"Mean KL divergence with this module alone quantized, and the SQNR of its output; the {len(bars)} worst",
        Bars(bars, Axis("KL divergence, nats per token"), mark),
    )


def layer_charts(attribution: Attribution) -> list[Figure]:
    """Return KL divergence and SQNR by layer, with a line per kind of module; none for a single layer."""
    if len({split_layer(row.module)[0] for row in attribution.rows}) < 2:
        return []
    kl = _by_layer(attribution.rows, lambda row: row.kl_alone, max)
    sqnr = _by_layer(attribution.rows, lambda row: row.sqnr_db, min)
    layer = Axis("layer", whole=True)
    figures = [
        Figure("KL divergence with a module alone quantized, by layer", Lines(kl, layer, Axis("nats", log=True))),
        Figure("SQNR of a module's output, by layer", Lines(sqnr, layer, Axis("dB"))),
    ]
    return [figure for figure, series in zip(figures, (kl, sqnr), strict=True) if series]


def _by_layer(
    rows: Sequence[ModuleDamage],
    value: Callable[[ModuleDamage], float | None],
    worst: Callable[[float, float], float],
) -> list[Series]:
    """Return a line per kind of module, at most as many as there are colours; of a layer's experts, the worst."""
    kinds: dict[str, dict[int, float]] = {}
    for row in rows:
        layer, measured = split_layer(row.module)[0], value(row)
        if measured is not None and math.isfinite(measured):
            layers = kinds.setdefault(name_in_layer(row.module), {})
            layers[layer] = worst(layers.get(layer, measured), measured)
    drawn = list(kinds.items())[: len(COLORS)]
    return [Series(kind, [(float(layer), layers[layer]) for layer in sorted(layers)]) for kind, layers in drawn]
