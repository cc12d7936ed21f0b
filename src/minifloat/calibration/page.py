"""The HTML page about activation statistics and the static scales computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minifloat.calibration.magnitudes import channel_section, magnitude_section
from minifloat.calibration.module_names import group_by_input, joined, running_order
from minifloat.calibration.rules import HistoryRule, Rule
from minifloat.calibration.scales import DEFAULT_MIN_TOKENS
from minifloat.calibration.stats import ActivationStats, KVStats
from minifloat.calibration.summary import (
    InputSummary,
    StatsSummary,
    change,
    fraction,
    number,
    run_facts,
    span,
    summarize,
)
from minifloat.model.architecture.groups import expert_group, fused_group
from minifloat.numerics.formats import E4M3
from minifloat.report.axes import Axis
from minifloat.report.charts import Bar, Series, bar_chart, line_chart, meter
from minifloat.report.page import Cell, Markup, box, bullets, facts, figure, folded, page, paragraph, section, table
from minifloat.report.text import name_in_layer, split_layer

_CURVES = 6  #: inputs in the chart of convergence
_WORST = 20  #: modules in a table of the worst


def stats_page(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None) -> str:
    """Return a self-contained HTML page about activation statistics and their static scales."""
    summary = summarize(stats, rule, held_out)
    return page(
        f"Activation statistics: {stats.model.architecture}",
        section("What was run", facts(run_facts(stats, rule, held_out)), _warning_box(summary.warnings)),
        _input_section(summary.inputs, rule),
        _cache_section(stats.kv, summary),
        _convergence_section(stats, summary),
        _held_out_section(summary.inputs, held_out),
        magnitude_section(_by_kind(summary.inputs), _with_histograms(stats, held_out)),
        channel_section(_by_kind(summary.inputs), stats),
        _expert_section(summary.inputs),
    )


def _with_histograms(stats: ActivationStats, held_out: ActivationStats | None) -> ActivationStats:
    """Return the statistics whose histograms are drawn: of the calibration text if it has them, else held out."""
    recorded = any(module.histogram is not None for module in stats.inputs.values())
    return stats if recorded or held_out is None else held_out


def _warning_box(warnings: Sequence[str]) -> str:
    return box("warning", "Warnings", bullets(warnings)) if warnings else ""


def _by_kind(inputs: Sequence[InputSummary]) -> dict[str, list[InputSummary]]:
    """Return the modules of all layers that read the same kind of input, by their names in a layer.

    A key looks like ``self_attn.q_proj / k_proj / v_proj``.
    """
    groups: dict[str, list[InputSummary]] = {}
    for row in inputs:
        groups.setdefault(fused_group(name_in_layer(row.module)), []).append(row)
    return {joined(name_in_layer(row.module) for row in group): group for group in groups.values()}


def _largest_by_layer(
    group: Sequence[InputSummary], value: Callable[[InputSummary], float | None]
) -> list[tuple[float, float]]:
    """Return points of the layer number and the largest value in that layer, without layers whose values are None."""
    largest: dict[int, float] = {}
    for row in group:
        layer, row_value = split_layer(row.module)[0], value(row)
        if row_value is not None:
            largest[layer] = max(row_value, largest.get(layer, 0.0))
    return [(float(layer), largest[layer]) for layer in sorted(largest)]


def _layer_chart(caption: str, series: Sequence[Series], label: str) -> str:
    x, y = Axis("layer", whole=True), Axis(label, log=True)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


def _input_section(inputs: Sequence[InputSummary], rule: Rule) -> str:
    groups = _by_kind(inputs)
    experts = "; of experts the largest" if any(expert_group(row.module) for row in inputs) else ""
    amax = [Series(name, _largest_by_layer(group, lambda row: row.amax)) for name, group in groups.items()]
    scales = [Series(name, _largest_by_layer(group, lambda row: row.scale)) for name, group in groups.items()]
    columns = ("input of", "layers", "tokens, least", "amax", "scale", "against max")
    rows: list[list[Cell]] = [_group_row(name, group) for name, group in groups.items()]
    layers = sorted({int(layer) for curve in amax for layer, _ in curve.points})
    by_kind = [(dict(amaxes.points), dict(scale.points)) for amaxes, scale in zip(amax, scales, strict=True)]
    numbers: list[list[Cell]] = [
        [
            f"layer {layer}",
            *(f"{span([amaxes.get(layer)], number)}; {span([scale.get(layer)], number)}" for amaxes, scale in by_kind),
        ]
        for layer in layers
    ]
    return section(
        "Inputs of the linears",
        table(columns, rows),
        _layer_chart(f"Largest magnitude (amax) that was seen, by layer{experts}", amax, "amax"),
        _layer_chart(f"Static scale by the rule {rule}, by layer: what multiplies to dequantize", scales, "scale"),
        folded("The numbers of these charts", table(("amax; scale", *groups), numbers)),
    )


def _group_row(name: str, group: Sequence[InputSummary]) -> list[Cell]:
    return [
        name,
        str(len({split_layer(row.module)[0] for row in group})),
        f"{min(row.tokens for row in group):,}",
        number(max(row.amax for row in group)),
        span((row.scale for row in group), number),
        span((row.against_max for row in group), change),
    ]


def _cache_section(kv: Mapping[str, KVStats], summary: StatsSummary) -> str:
    if not kv:
        return section("Keys and values", paragraph("No keys and values were observed."))
    series = []
    for letter in ("k", "v"):
        heads = {
            float(split_layer(f"{name}.x")[0]): (stats.k_amax if letter == "k" else stats.v_amax).max(0, initial=0.0)
            for name, stats in sorted(kv.items(), key=lambda pair: running_order(pair[0]))
        }
        points = [(layer, float(amax.max(initial=0.0))) for layer, amax in heads.items()]
        bands = [
            (layer, float(amax.min(initial=math.inf)), float(amax.max(initial=0.0))) for layer, amax in heads.items()
        ]
        series.append(Series(letter.upper(), points, bands))
    caption = "Largest magnitude of K, after rotary embedding, and of V, by layer; shaded: the range over heads"
    rows = [(row.tensor, span(row.amax, number), span([row.scale], number)) for row in summary.caches]
    return section(
        "Keys and values",
        _layer_chart(caption, series, "amax"),
        folded("The numbers of this chart", table(("cache", "amax by head", f"scale by {summary.history_rule}"), rows)),
    )


def _convergence_section(stats: ActivationStats, summary: StatsSummary) -> str:
    slowest: dict[str, list[InputSummary]] = {}
    for row in sorted(summary.inputs, key=_settling_order, reverse=True):
        if row.amax > 0:
            slowest.setdefault(fused_group(row.module), []).append(row)
    series = [_curve(stats, group, summary.history_rule) for group in list(slowest.values())[:_CURVES]]
    caption = (
        f"Running scale by the rule {summary.history_rule}, relative to the final one; the inputs that settled last"
    )
    x, y = Axis("sequences"), Axis("scale / final scale")
    note = "A flat end means that more text of this kind would not change the scale; other text may."
    chart = figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width, markers=False))
    return section("Convergence", chart, paragraph(note))


def _settling_order(row: InputSummary) -> tuple[bool, float]:
    """Return a sort key by which early-settled scales come first, then late-settled, then unsettled ones."""
    moved = row.convergence
    return (not moved.settled, moved.change if not moved.settled else float(moved.settled_after or 0))


def _curve(stats: ActivationStats, group: Sequence[InputSummary], rule: HistoryRule) -> Series:
    """Return the running scale of inputs that share it, relative to its final value."""
    module = stats.inputs[group[0].module]
    observed = np.flatnonzero(module.tokens > 0)
    running = rule.running(module.amax[observed])
    final = running[-1]
    points = [
        (float(index + 1), float(value / final)) for index, value in zip(observed, running, strict=True) if final > 0
    ]
    return Series(joined(row.module for row in group), points)


def _held_out_section(inputs: Sequence[InputSummary], held_out: ActivationStats | None) -> str:
    if held_out is None:
        return section("Held-out text", paragraph("Nothing was held out: what the scales do to new text is not known."))
    measured = {row.module: (row, row.lost) for row in inputs if row.lost is not None}
    groups = [(joined(names), *measured[names[0]]) for names in group_by_input(measured).values()]
    worst = sorted(groups, key=lambda group: (-group[2].saturated, -group[2].flushed))[:_WORST]
    most = max((lost.saturated for _, _, lost in worst), default=0.0)
    rows: list[list[Cell]] = [
        [
            name,
            _meter_cell(lost.saturated, most),
            fraction(lost.flushed),
            number(held_out.inputs[row.module].max),
            span([row.scale and row.scale * E4M3.max], number),
        ]
        for name, row, lost in worst
    ]
    return section(
        "Held-out text",
        paragraph(
            f"Fractions of the elements of {held_out.tokens:,} tokens that the scales were not made from; "
            f"the {len(rows)} worst of {len(groups)} inputs. Bars are relative to the worst."
        ),
        table(("input of", "saturated", "flushed to zero", "amax held out", "largest that fits"), rows),
    )


def _meter_cell(value: float, most: float) -> Markup:
    return Markup(f"{fraction(value)} {meter(value / most if most else 0.0)}")


def _expert_section(inputs: Sequence[InputSummary]) -> str:
    tokens: dict[str, int] = {}
    for row in inputs:
        if expert_group(row.module):
            tokens[row.module.rpartition(".")[0]] = row.tokens
    if not tokens:
        return ""
    fewest = sorted(tokens.items(), key=lambda pair: pair[1])[:_WORST]
    bars = [Bar(name, float(count), f"{count:,}") for name, count in fewest]
    caption = f"Tokens routed to the {len(bars)} experts that saw the fewest, of {len(tokens)}"
    floor = (float(DEFAULT_MIN_TOKENS), f"floor: {DEFAULT_MIN_TOKENS}")
    draw = figure(caption, lambda width: bar_chart(bars, title=caption, axis=Axis("tokens"), mark=floor, width=width))
    return section("Experts", draw)
