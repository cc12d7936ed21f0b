"""What `calibrate` says about activation statistics and the static scales computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from minifloat.calibration.magnitudes import channel_section, magnitude_section
from minifloat.calibration.rules import DEFAULT_RULE, Rule
from minifloat.calibration.scales import DEFAULT_MIN_TOKENS, trajectory
from minifloat.calibration.stats import ActivationStats, KVStats
from minifloat.calibration.summary import (
    InputSummary,
    StatsSummary,
    group_by_input,
    joined,
    run_facts,
    running_order,
    settled_text,
    summarize,
)
from minifloat.model.architecture.roles import expert_group, fused_group
from minifloat.numerics.formats import E4M3
from minifloat.report.document import (
    Alert,
    Axis,
    Bar,
    Bars,
    Column,
    Document,
    Facts,
    Figure,
    Folded,
    Lines,
    On,
    Section,
    Series,
    Table,
    Text,
    columns,
    section,
)
from minifloat.report.text import change, fraction, layer_pattern, name_in_layer, short, span, split_layer

_BY_MAX = f"By the rule {DEFAULT_RULE}, since histograms lack the data: when scales settled, and the cache."
_CURVES = 6  #: inputs in the chart of convergence
_WORST = 20  #: modules in a table of the worst


def document(
    stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None, *, verbose: bool = False
) -> Document:
    """Return facts of the run, the inputs of modules (of each with `verbose`), the KV cache, and warnings."""
    summary = summarize(stats, rule, held_out)
    by_kind = _by_kind(summary.inputs)
    recorded = any(module.histogram is not None for module in stats.inputs.values())
    warnings = summary.warnings
    return Document(
        f"Activation statistics: {stats.model.architecture}",
        [
            section(
                "What was run",
                Facts(run_facts(stats, rule, held_out)),
                Alert("warning", "Warnings", warnings, on=On.PAGE) if warnings else None,
            ),
            section(
                "Inputs of the linears",
                _input_table(summary.inputs, verbose=verbose),
                *_input_charts(by_kind, rule),
            ),
            section("", Text(_BY_MAX if rule != DEFAULT_RULE else "")),
            _cache_section(stats.kv, summary),
            _convergence_section(stats, summary),
            _held_out_section(summary.inputs, held_out),
            magnitude_section(by_kind, stats if recorded or held_out is None else held_out),
            channel_section(by_kind, stats),
            _expert_section(summary.inputs),
            *(section("", Text(f"Warning: {warning}"), on=On.TERMINAL) for warning in warnings),
        ],
    )


def _by_kind(inputs: Sequence[InputSummary]) -> dict[str, list[InputSummary]]:
    """Return the modules of all layers that read the same kind of input, by their names in a layer."""
    groups: dict[str, list[InputSummary]] = {}
    for row in inputs:
        groups.setdefault(fused_group(name_in_layer(row.module)), []).append(row)
    return {joined(name_in_layer(row.module) for row in group): group for group in groups.values()}


def _input_table(inputs: Sequence[InputSummary], *, verbose: bool) -> Table:
    groups: dict[str, list[InputSummary]] = {}
    for summary in inputs:
        groups.setdefault(summary.module if verbose else layer_pattern(summary.module), []).append(summary)
    rows = [
        [
            name,
            str(len(group)),
            f"{min(member.tokens for member in group):,}",
            short(max(member.amax for member in group)),
            span(member.scale for member in group),
            span((member.against_max for member in group), _change),
            *_lost_cells(group),
            settled_text([member.convergence for member in group]),
            _note(group),
        ]
        for name, group in groups.items()
    ]
    numbers = ("count", "tokens", "amax", "scale", "vs max", "saturated", "flushed", "settled after")
    return Table(columns("input of", *numbers, Column("note", left=True, folds=True), folds=True), rows)


def _change(value: float) -> str:
    return change(value, 1) if value else "0"


def _lost_cells(group: Sequence[InputSummary]) -> tuple[str, str]:
    """Return the largest fractions of saturated and flushed inputs in a group."""
    errors = [member.lost for member in group if member.lost is not None]
    if not errors:
        return ("", "")
    return (fraction(max(error.saturated for error in errors)), fraction(max(error.flushed for error in errors)))


def _note(group: Sequence[InputSummary]) -> str:
    """Return how many modules of a group have no scale, or a borrowed one."""
    if len(group) == 1 and group[0].scale is None:
        return "no scale: only zeros" if group[0].tokens else "no scale: never called"
    missing = sum(member.scale is None for member in group)
    borrowed = sum(member.scale is not None and bool(member.problem) for member in group)
    return ", ".join(
        f"{count} {problem}" for count, problem in ((missing, "no scale"), (borrowed, "borrowed")) if count
    )


def _input_charts(groups: Mapping[str, Sequence[InputSummary]], rule: Rule) -> list[Figure | Folded]:
    """Return amax and scale by layer, with their numbers."""
    experts = "; of experts the largest" if any(expert_group(row.module) for g in groups.values() for row in g) else ""
    amax = [Series(name, _largest_by_layer(group, lambda row: row.amax)) for name, group in groups.items()]
    scales = [Series(name, _largest_by_layer(group, lambda row: row.scale)) for name, group in groups.items()]
    layers = sorted({int(layer) for curve in amax for layer, _ in curve.points})
    by_kind = [(dict(amaxes.points), dict(scale.points)) for amaxes, scale in zip(amax, scales, strict=True)]
    rows = [
        [f"layer {layer}", *(f"{span([amaxes.get(layer)])}; {span([scale.get(layer)])}" for amaxes, scale in by_kind)]
        for layer in layers
    ]
    return [
        _layer_chart(f"Largest magnitude (amax) that was seen, by layer{experts}", amax, "amax"),
        _layer_chart(f"Static scale by the rule {rule}, by layer: what multiplies to dequantize", scales, "scale"),
        Folded("The numbers of these charts", [Table(columns("amax; scale", *groups), rows)], on=On.PAGE),
    ]


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


def _layer_chart(caption: str, series: Sequence[Series], label: str) -> Figure:
    return Figure(caption, Lines(series, Axis("layer", whole=True), Axis(label, log=True)))


def _cache_section(kv: Mapping[str, KVStats], summary: StatsSummary) -> Section:
    if not kv:
        return section("Keys and values", Text("No keys and values were observed."), on=On.PAGE)
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
    rows = [
        [row.tensor, str(len(row.amax)), span(row.amax), span([row.scale]), settled_text([row.convergence])]
        for row in summary.caches
    ]
    table = Table(columns("cache", "heads", "amax by head", "scale", "settled after"), rows)
    return section(
        "Keys and values", _layer_chart(caption, series, "amax"), Folded("The numbers of this chart", [table])
    )


def _convergence_section(stats: ActivationStats, summary: StatsSummary) -> Section:
    slowest: dict[str, list[InputSummary]] = {}
    for row in sorted(summary.inputs, key=_settling_order, reverse=True):
        if row.amax > 0:
            slowest.setdefault(fused_group(row.module), []).append(row)
    series = [_curve(stats, group) for group in list(slowest.values())[:_CURVES]]
    caption = f"Running scale by the rule {DEFAULT_RULE}, relative to the final one; the inputs that settled last"
    return section(
        "Convergence",
        Figure(caption, Lines(series, Axis("sequences"), Axis("scale / final scale"), markers=False)),
        Text("A flat end means that more text of this kind would not change the scale; other text may."),
        on=On.PAGE,
    )


def _settling_order(row: InputSummary) -> tuple[bool, float]:
    """Return a sort key by which early-settled scales come first, then late-settled, then unsettled ones."""
    moved = row.convergence
    return (not moved.settled, moved.change if not moved.settled else float(moved.settled_after or 0))


def _curve(stats: ActivationStats, group: Sequence[InputSummary]) -> Series:
    """Return the running scale of inputs that share it, relative to its final value."""
    module = stats.inputs[group[0].module]
    observed = np.flatnonzero(module.tokens > 0)
    running = trajectory(module.amax[observed])
    final = running[-1]
    points = [
        (float(index + 1), float(value / final)) for index, value in zip(observed, running, strict=True) if final > 0
    ]
    return Series(joined(row.module for row in group), points)


def _held_out_section(inputs: Sequence[InputSummary], held_out: ActivationStats | None) -> Section:
    title = "Held-out text"
    if held_out is None:
        return section(title, Text("Nothing was held out: what the scales do to new text is not known."), on=On.PAGE)
    measured = {row.module: (row, row.lost) for row in inputs if row.lost is not None}
    groups = [(joined(names), *measured[names[0]]) for names in group_by_input(measured).values()]
    worst = sorted(groups, key=lambda group: (-group[2].saturated, -group[2].flushed))[:_WORST]
    rows = [
        [
            name,
            fraction(lost.saturated),
            fraction(lost.flushed),
            short(held_out.inputs[row.module].max),
            span([row.scale and row.scale * E4M3.max]),
        ]
        for name, row, lost in worst
    ]
    return section(
        title,
        Text(
            f"Fractions of the elements of {held_out.tokens:,} tokens that the scales were not made from; "
            f"the {len(rows)} worst of {len(groups)} inputs."
        ),
        Table(columns("input of", "saturated", "flushed to zero", "amax held out", "largest that fits"), rows),
        on=On.PAGE,
    )


def _expert_section(inputs: Sequence[InputSummary]) -> Section:
    tokens: dict[str, int] = {}
    for row in inputs:
        if expert_group(row.module):
            tokens[row.module.rpartition(".")[0]] = row.tokens
    fewest = sorted(tokens.items(), key=lambda pair: pair[1])[:_WORST]
    bars = [Bar(name, float(count), f"{count:,}") for name, count in fewest]
    caption = f"Tokens routed to the {len(bars)} experts that saw the fewest, of {len(tokens)}"
    floor = (float(DEFAULT_MIN_TOKENS), f"floor: {DEFAULT_MIN_TOKENS}")
    return section("Experts", Figure(caption, Bars(bars, Axis("tokens"), floor)) if bars else None)
