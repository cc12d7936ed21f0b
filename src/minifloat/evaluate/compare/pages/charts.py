"""The charts of a comparison's page; a function returns an empty string if there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from minifloat.evaluate.compare.attribution import Attribution, ModuleDamage
from minifloat.evaluate.compare.generation import GreedyDivergence
from minifloat.evaluate.compare.pages.numbers import increase, number, percent, short, with_interval
from minifloat.evaluate.compare.pages.words import position_label
from minifloat.evaluate.compare.result import CandidateResult
from minifloat.evaluate.compare.verdict import Tolerance
from minifloat.report.axes import Axis
from minifloat.report.charts import Bar, Dot, Series, bar_chart, dot_chart, line_chart
from minifloat.report.page import figure
from minifloat.report.scatter import ScatterPoint, scatter_chart
from minifloat.report.svg import COLORS
from minifloat.report.text import name_in_layer, short_names, split_layer, visible

_WORST_MODULES = 15
#: About how many points a curve over the tokens of continuations has.
_CURVE_POINTS = 100
#: Smaller fractions of the largest KL divergence are rounding, and would take most of a log axis.
_SMALLEST_SHARE = 1e-7
_MEBI = 1 << 20


def change_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> str:
    """Draw the change of perplexity by text, with intervals and the bound."""
    rows = []
    for place, summary in enumerate(candidates[0].summaries):
        changes = [increase(candidate.summaries[place]) for candidate in candidates]
        texts = [with_interval(change, as_percent=True, signed=True) for change in changes]
        dots = [Dot(change.value, text, change.low, change.high) for change, text in zip(changes, texts, strict=True)]
        rows.append((visible(summary.name), dots))
    bound = candidates[0].verdict.tolerance.max_ppl_increase
    caption = "Change of perplexity with its 95% interval, by text"
    decreases = any(min(dot.value, dot.low) < 0 for _, dots in rows for dot in dots)
    axis = Axis("change of perplexity", percent=True, low=None if decreases else 0.0)
    return dot_figure(rows, names, caption, axis, (bound, f"bound {percent(bound)}"))


def kl_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> str:
    """Draw the share of tokens with a KL divergence above a value.

    One candidate gets a curve per text; several candidates get one curve each, over all texts.
    """
    if len(candidates) == 1:
        curves = [(visible(summary.name), summary) for summary in candidates[0].summaries]
    else:
        curves = [(name, candidate.overall) for name, candidate in zip(names, candidates, strict=True)]
    largest = max((kl for _, summary in curves for _, kl in summary.kl_curve if math.isfinite(kl)), default=0.0)
    if largest <= 0:
        return ""
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
    caption = "Share of the tokens whose KL divergence is larger"
    x = Axis("KL divergence, nats", log=True)
    y = Axis("share of the tokens above", log=True, percent=True)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


def size_chart(candidates: Sequence[CandidateResult]) -> str:
    """Draw the bytes of each candidate against its mean KL divergence; empty below two candidates."""
    names = short_names([candidate.model.name for candidate in candidates])
    points = [
        ScatterPoint(name, candidate.model.nbytes / _MEBI, kl.value, kl.low, kl.high)
        for name, candidate in zip(names, candidates, strict=True)
        if candidate.model.nbytes is not None and (kl := candidate.overall.kl_mean).value > 0
    ]
    if len(points) < 2:
        return ""
    bound = candidates[0].verdict.tolerance.max_kl
    mark = (bound, f"bound {short(bound)}") if bound > 0 else None
    caption = "Size against mean KL divergence with its 95% interval; dotted: no candidate is both smaller and nearer"
    x, y = Axis("weights, MiB"), Axis("KL divergence, nats per token", log=True)
    return figure(caption, lambda width: scatter_chart(points, title=caption, x=x, y=y, mark=mark, width=width))


def margin_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> str:
    """Draw the share of the same top-1 by the baseline's margin."""
    rows = []
    for place, first in enumerate(candidates[0].overall.margins):
        shares = [candidate.overall.margins[place].same_top1 for candidate in candidates]
        reach = f"{first.low:g} to {first.high:g}" if math.isfinite(first.high) else f"above {first.low:g}"
        if first.tokens:
            rows.append(
                (
                    f"{reach} nats ({first.tokens:,} tokens)",
                    [Dot(share, f"{share:.2%}") for share in shares],
                )
            )
    caption = "The same first choice, by how sure the baseline was: nats between its first and second choice"
    return dot_figure(rows, names, caption, Axis("same top-1", percent=True, high=1.0))


def position_chart(candidates: Sequence[CandidateResult], names: Sequence[str]) -> str:
    """Draw the mean KL divergence by position in the window, on all texts together."""
    found = [candidate.overall.positions for candidate in candidates]
    rows = []
    for place, first in enumerate(found[0].ranges if found[0] is not None else ()):
        means = [positions.ranges[place].kl_mean for positions in found if positions is not None]
        dots = [Dot(mean.value, with_interval(mean, digits=1), mean.low, mean.high) for mean in means]
        rows.append((f"{position_label(first)} ({first.tokens:,} tokens)", dots))
    caption = "Mean KL divergence with its 95% interval, by position in the window"
    return dot_figure(rows, names, caption, Axis("KL divergence, nats per token", low=0.0))


def survival_chart(divergences: Sequence[tuple[str, GreedyDivergence]]) -> str:
    """Draw the share of prompts whose continuations are still the same, by number of tokens."""
    series = [Series(name, _survival(divergence)) for name, divergence in divergences]
    caption = "Prompts that both models still continue by the same tokens"
    x, y = Axis("tokens", whole=True), Axis("share of the prompts", percent=True, low=0.0, high=1.0)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width, markers=False))


def _survival(divergence: GreedyDivergence) -> list[tuple[float, float]]:
    counts = sorted(
        {*range(0, divergence.new_tokens, max(divergence.new_tokens // _CURVE_POINTS, 1)), divergence.new_tokens}
    )
    lengths = [divergence.new_tokens if first is None else first for first in divergence.first_difference]
    return [(float(count), sum(length >= count for length in lengths) / max(len(lengths), 1)) for count in counts]


def module_chart(attribution: Attribution, tolerance: Tolerance) -> str:
    """Draw the KL divergence of the worst modules alone."""
    measured = [row for row in attribution.rows if row.kl_alone is not None][:_WORST_MODULES]
    bars = [
        Bar(visible(row.module), row.kl_alone or 0.0, f"{number(row.kl_alone or 0.0, 2)}; {number(row.sqnr_db, 3)} dB")
        for row in measured
    ]
    if not bars:
        return ""
    caption = f"Mean KL divergence with this module alone quantized, and the SQNR of its output; the {len(bars)} worst"
    bound = tolerance.max_kl
    largest = max(bar.value for bar in bars)
    mark = (bound, f"bound of the whole model {number(bound, 1)}") if largest > bound / 4 else None
    axis = Axis("KL divergence, nats per token")
    return figure(caption, lambda width: bar_chart(bars, title=caption, axis=axis, mark=mark, width=width))


def layer_charts(attribution: Attribution) -> str:
    """Draw KL divergence and SQNR by layer, with a line per kind of module; empty for a single layer."""
    if len({split_layer(row.module)[0] for row in attribution.rows}) < 2:
        return ""
    kl = _by_layer(attribution.rows, lambda row: row.kl_alone, max)
    sqnr = _by_layer(attribution.rows, lambda row: row.sqnr_db, min)
    return _layer_figure("KL divergence with a module alone quantized, by layer", kl, Axis("nats", log=True)) + (
        _layer_figure("SQNR of a module's output, by layer", sqnr, Axis("dB"))
    )


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
            layers = kinds.setdefault(visible(name_in_layer(row.module)), {})
            layers[layer] = worst(layers.get(layer, measured), measured)
    shown = list(kinds.items())[: len(COLORS)]
    return [Series(kind, [(float(layer), layers[layer]) for layer in sorted(layers)]) for kind, layers in shown]


def _layer_figure(caption: str, series: Sequence[Series], y: Axis) -> str:
    if not series:
        return ""
    x = Axis("layer", whole=True)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


def dot_figure(
    rows: Sequence[tuple[str, Sequence[Dot]]],
    names: Sequence[str],
    caption: str,
    axis: Axis,
    mark: tuple[float, str] | None = None,
) -> str:
    """Draw values with their intervals."""
    if not any(math.isfinite(dot.value) for _, dots in rows for dot in dots):
        return ""
    return figure(caption, lambda width: dot_chart(rows, names, title=caption, axis=axis, mark=mark, width=width))
