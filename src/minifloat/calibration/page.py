"""What activation statistics say, as numbers (`summarize`) and as a page (`stats_page`).

The numbers are computed once, here, for the page and for the terminal (`display_stats`). They come from `scales` and
`convergence`, which refuse modules that calibration did not reach; a report must show those instead, so they are left
out of the computation and named. Nothing here changes a scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from minifloat._version import __version__
from minifloat.architecture.groups import expert_group, fused_group
from minifloat.calibration import convergence
from minifloat.calibration.convergence import Convergence
from minifloat.calibration.rules import HistoryRule, Rule, history_rule
from minifloat.calibration.scales import (
    DEFAULT_MIN_TOKENS,
    KVScales,
    Saturation,
    StaticScales,
    activation_scales,
    kv_scales,
    saturation,
)
from minifloat.calibration.stats import SCHEMA_VERSION, ActivationStats, KVStats
from minifloat.errors import NotCalibratedError, StatsError
from minifloat.numerics.formats import E4M3
from minifloat.report.axes import Axis, format_number
from minifloat.report.charts import Bar, Series, bar_chart, line_chart, meter
from minifloat.report.page import Cell, Markup, box, bullets, facts, figure, folded, page, paragraph, section, table

_SHOWN = 8  #: names in a warning, and curves in a chart
_WORST = 20  #: modules in a table of the worst

#: The linears of a layer as they run; others come after them.
_LEAVES = ("q", "k", "v", "o", "gate", "w1", "up", "w3", "down", "w2")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class InputSummary:
    """The input of one linear.

    Attributes:
        module: Its name in the checkpoint.
        tokens: Tokens that it saw.
        amax: The largest magnitude that it saw.
        scale: The static scale by the rule; None: it cannot have one, `problem` says why.
        against_max: How far the scale lies from that of the rule ``max``, relative to it; None without a scale.
        lost: What the scale does to held-out text; None where nothing was held out, or none of it reached the module.
        convergence: How the scale moved.
        problem: Why there is no scale, or why it is not the module's own; empty where all is well.
    """

    module: str
    tokens: int
    amax: float
    scale: float | None
    against_max: float | None
    lost: Saturation | None
    convergence: Convergence
    problem: str = ""


@dataclass(frozen=True)
class CacheSummary:
    """K or V of one attention.

    Attributes:
        tensor: Name of the attention in the checkpoint, with ``.k`` or ``.v``.
        amax: The largest magnitude of each KV head.
        scale: The static scale by the rule; None: only zeros were seen.
        convergence: How the scale moved.
    """

    tensor: str
    amax: tuple[float, ...]
    scale: float | None
    convergence: Convergence


@dataclass(frozen=True)
class StatsSummary:
    """All that a report shows.

    Attributes:
        inputs: In the order in which a decoder runs them.
        caches: K and V of each attention.
        history_rule: The rule, or, where it is of the histogram, the one by which caches and convergence are judged.
        warnings: What one should know before using the scales.
    """

    inputs: tuple[InputSummary, ...]
    caches: tuple[CacheSummary, ...]
    history_rule: HistoryRule
    warnings: tuple[str, ...]


def summarize(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None) -> StatsSummary:
    """What statistics say, module by module.

    Args:
        stats: What calibration saw.
        rule: Statistics to amax.
        held_out: What a run over other text saw, with histograms.

    Raises:
        UsageError: The rule, or the held-out text, needs histograms and there are none.
        StatsError: The held-out run is of another model.
    """
    if held_out is not None and (differences := stats.model.differences(held_out.model)):
        raise StatsError("held-out statistics", f"they are of another model, it differs in {', '.join(differences)}")
    judged_by = history_rule(rule)
    moved = convergence.report(stats, judged_by)
    scales, refused = _without_refused(lambda names: activation_scales(stats, rule, modules=names), stats.inputs)
    by_max, _ = _without_refused(lambda names: activation_scales(stats, modules=names), stats.inputs)
    inputs = tuple(_inputs(stats, scales, by_max, refused, held_out, moved.scales))
    caches = tuple(_caches(stats, judged_by, moved.scales))
    return StatsSummary(inputs, caches, judged_by, tuple(_warnings(stats, inputs, caches, moved)))


def stats_page(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None) -> str:
    """A self-contained HTML page about statistics and the static scales from them.

    Args:
        stats: What calibration saw.
        rule: Statistics to amax.
        held_out: What a run over other text saw, with histograms.

    Raises:
        UsageError: The rule, or the held-out text, needs histograms and there are none.
        StatsError: The held-out run is of another model.
    """
    summary = summarize(stats, rule, held_out)
    return page(
        f"Activation statistics: {stats.model.architecture}",
        section("What was run", facts(run_facts(stats, rule, held_out)), _warning_box(summary.warnings)),
        _input_section(summary.inputs, rule),
        _cache_section(stats.kv, summary),
        _convergence_section(stats, summary),
        _held_out_section(summary.inputs, held_out),
        _expert_section(summary.inputs),
    )


def run_facts(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None) -> list[tuple[str, str]]:
    """What was run, as names and values."""
    found = [
        ("model", stats.model.architecture),
        ("weights", f"sampled sha256 {stats.model.weights[:16]}"),
        ("data", f"{stats.sequences:,} sequences, {stats.tokens:,} tokens"),
        *(("", line) for line in _data_lines(stats.data)),
        ("rule", f"{rule} ({rule.summary})"),
    ]
    if held_out is not None:
        found.append(("held out", f"{held_out.sequences:,} sequences, {held_out.tokens:,} tokens"))
    return [*found, ("versions", f"minifloat {__version__}, statistics {SCHEMA_VERSION}")]


def kind_of(module: str) -> str:
    """What the inputs of all layers of one kind share: the name after the layer, without the number of the expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", split_layer(module)[1])


def settled_text(convergences: Sequence[Convergence]) -> str:
    """After how many sequences the slowest has settled, or how many have not; those that saw nothing do not count."""
    seen = [one for one in convergences if one.settled or math.isfinite(one.change)]
    moving = sum(not one.settled for one in seen)
    if not moving:
        return str(max(one.settled_after or 0 for one in seen)) if seen else "-"
    return "no" if len(seen) == 1 else f"no: {moving} of {len(seen)}"


# ------------------------------------------------------------------------------------------------- numbers


def _without_refused(compute: Callable[[list[str]], _Result], modules: Iterable[str]) -> tuple[_Result, dict[str, str]]:
    """What `compute` gives for all modules that it does not refuse, and why it refuses the others."""
    names, refused = list(modules), dict[str, str]()
    while True:
        try:
            return compute(names), refused
        except NotCalibratedError as error:
            reason = str(error).rpartition(": ")[2]
            refused |= dict.fromkeys(error.modules, reason)
            names = [name for name in names if name not in refused]


def _inputs(
    stats: ActivationStats,
    scales: StaticScales,
    by_max: StaticScales,
    refused: Mapping[str, str],
    held_out: ActivationStats | None,
    moved: Mapping[str, Convergence],
) -> Iterator[InputSummary]:
    others = {} if held_out is None else held_out.inputs
    for name in sorted(stats.inputs, key=_running_order):
        module = stats.inputs[name]
        scale = scales.scales.get(name)
        other = others.get(name)
        reached = scale is not None and other is not None and other.total_tokens
        yield InputSummary(
            module=name,
            tokens=module.total_tokens,
            amax=module.max,
            scale=None if scale is None else float(scale),
            against_max=None if scale is None else float(scale) / float(by_max.scales[name]) - 1.0,
            lost=saturation(other, float(scale)) if reached and other is not None and scale is not None else None,
            convergence=moved[f"{name}.input_scale"],
            problem=refused.get(name) or scales.fallbacks.get(name, ""),
        )


def _caches(stats: ActivationStats, rule: HistoryRule, moved: Mapping[str, Convergence]) -> Iterator[CacheSummary]:
    scales, _ = _without_refused(lambda names: kv_scales(stats, rule, modules=names), stats.kv)
    for name in sorted(stats.kv, key=_running_order):
        one = stats.kv[name]
        pair: KVScales | tuple[None, None] = scales.get(name, (None, None))
        for letter, amax, scale in (("k", one.k_amax, pair[0]), ("v", one.v_amax, pair[1])):
            heads = tuple(float(head) for head in amax.max(axis=0, initial=0.0))
            known = None if scale is None else float(scale)
            yield CacheSummary(f"{name}.{letter}", heads, known, moved[f"{name}.{letter}_scale"])


def _warnings(
    stats: ActivationStats,
    inputs: Sequence[InputSummary],
    caches: Sequence[CacheSummary],
    moved: convergence.ConvergenceReport,
) -> Iterator[str]:
    unseen = [one.module for one in inputs if not one.tokens]
    if unseen:
        together = [_joined(group) for group in _sharing(unseen).values()]
        yield f"Never called ({len(unseen)} modules): {_names(together)}."
    no_scale = [one.module for one in inputs if one.tokens and one.scale is None]
    no_scale += [one.tensor for one in caches if one.scale is None]
    if no_scale:
        yield f"No scale, for nothing but zeros were seen ({len(no_scale)}): {_names(no_scale)}."
    starved = {
        one.module.rpartition(".")[0]: f"{one.module.rpartition('.')[0]} ({one.tokens})"
        for one in inputs
        if one.problem and one.scale is not None
    }
    if starved:
        yield (
            f"Experts that saw fewer than {DEFAULT_MIN_TOKENS} tokens borrow the largest amax among the experts of "
            f"their layer ({len(starved)} experts, with their tokens): {_names(list(starved.values()))}."
        )
    if stats.sequences <= moved.window:
        yield (
            f"Too few sequences to tell whether the scales have settled: {stats.sequences}, "
            f"where more than {moved.window} are needed."
        )
        return
    moving = [name for name in moved.unsettled if math.isfinite(moved.scales[name].change)]
    if moving:
        scale_of = {name.removesuffix(".input_scale"): name for name in moving}
        groups = _sharing(scale_of).values()
        changes = [f"{_joined(group)} ({moved.scales[scale_of[group[0]]].change:.1%})" for group in groups]
        yield (
            f"Not settled within {moved.tolerance:.0%} over the last {moved.window} sequences "
            f"({len(moving)} of {len(moved.scales)} scales, with how far they moved): {_names(changes)}. "
            "Calibrate on more text."
        )


def _names(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _data_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """The record of the calibration set in words; what is not known here is shown as it is."""
    merged = data.get("merged")
    if isinstance(merged, list):
        for record in merged:
            yield from _data_lines(record) if isinstance(record, Mapping) else [str(record)]
        return
    sources = data.get("sources")
    for source in sources if isinstance(sources, list) else []:
        yield _source_line(source) if isinstance(source, Mapping) else str(source)
    told = {"sources", "sequences", "tokens"}
    rest = {key: value for key, value in data.items() if key not in told}
    if rest:
        yield ", ".join(f"{key} {_brief(value)}" for key, value in rest.items())


def _source_line(source: Mapping[str, Any]) -> str:
    known = {key: value for key, value in source.items() if key != "name" and value is not None}
    return f"{source.get('name', 'text')}: " + ", ".join(f"{key} {_brief(value)}" for key, value in known.items())


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_brief(item)}" for key, item in value.items()) + ")"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{64}", text) else text


def _running_order(module: str) -> tuple[Any, ...]:
    """Sorts modules as a decoder runs them, whatever the order of a file: by layer, attention first, then experts."""
    parent, _, leaf = module.rpartition(".")
    numbered = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parent.split(".")]
    role = leaf.removesuffix("_proj")
    rank = _LEAVES.index(role) if role in _LEAVES else len(_LEAVES)
    return split_layer(module)[0], "attn" not in parent, numbered, rank, leaf


def split_layer(module: str) -> tuple[int, str]:
    """The number of the layer, and what comes after it; layer 0 where the name has none."""
    match = re.search(r"(?:^|\.)(\d+)\.(?=.)", module)
    return (int(match[1]), module[match.end() :]) if match else (0, module)


def _by_input(inputs: Iterable[InputSummary]) -> dict[str, list[InputSummary]]:
    """Modules of all layers that read one input, by their names: ``self_attn.q_proj / k_proj / v_proj``."""
    groups: dict[str, list[InputSummary]] = {}
    for one in inputs:
        groups.setdefault(fused_group(kind_of(one.module)), []).append(one)
    return {_joined(kind_of(one.module) for one in group): group for group in groups.values()}


def _sharing(modules: Iterable[str]) -> dict[str, list[str]]:
    """Modules by the input that they share, in order."""
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(fused_group(name), []).append(name)
    return groups


def _joined(names: Iterable[str]) -> str:
    """Names with one parent, as one: ``self_attn.q_proj / k_proj / v_proj``."""
    first, *others = sorted(set(names), key=_running_order)
    return " / ".join([first, *(name.rpartition(".")[2] for name in others)])


def _largest_by_layer(
    group: Sequence[InputSummary], value: Callable[[InputSummary], float | None]
) -> list[tuple[float, float]]:
    largest: dict[int, float] = {}
    for one in group:
        layer, found = split_layer(one.module)[0], value(one)
        if found is not None:
            largest[layer] = max(found, largest.get(layer, 0.0))
    return [(float(layer), largest[layer]) for layer in sorted(largest)]


# ------------------------------------------------------------------------------------------------- sections


def _warning_box(warnings: Sequence[str]) -> str:
    return box("warning", "Warnings", bullets(warnings)) if warnings else ""


def _layer_chart(caption: str, series: Sequence[Series], label: str) -> str:
    x, y = Axis("layer", whole=True), Axis(label, log=True)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


def _input_section(inputs: Sequence[InputSummary], rule: Rule) -> str:
    groups = _by_input(inputs)
    experts = "; of experts the largest" if any(expert_group(one.module) for one in inputs) else ""
    amax = [Series(name, _largest_by_layer(group, lambda one: one.amax)) for name, group in groups.items()]
    scales = [Series(name, _largest_by_layer(group, lambda one: one.scale)) for name, group in groups.items()]
    columns = ("input of", "layers", "tokens, least", "amax", "scale", "against max")
    rows: list[list[Cell]] = [_group_row(name, group) for name, group in groups.items()]
    layers = sorted({int(layer) for one in amax for layer, _ in one.points})
    by_layer = [(dict(large.points), dict(scale.points)) for large, scale in zip(amax, scales, strict=True)]
    numbers: list[list[Cell]] = [
        [
            f"layer {layer}",
            *(f"{span([large.get(layer)], number)}; {span([scale.get(layer)], number)}" for large, scale in by_layer),
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
        str(len({split_layer(one.module)[0] for one in group})),
        f"{min(one.tokens for one in group):,}",
        number(max(one.amax for one in group)),
        span((one.scale for one in group), number),
        span((one.against_max for one in group), change),
    ]


def span(values: Iterable[float | None], form: Callable[[float], str]) -> str:
    """Least and largest, or one number where they look the same; a dash where all are None."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    least, largest = form(min(known)), form(max(known))
    return least if least == largest else f"{least} .. {largest}"


def number(value: float) -> str:
    """A magnitude with four digits."""
    return format_number(float(f"{value:.4g}"))


def change(value: float) -> str:
    """A relative change in percent, with its sign; 0 where there is none."""
    return f"{value:+.1%}" if value else "0"


def fraction(value: float) -> str:
    """A fraction that may be tiny; 0 where it is none."""
    return f"{value:.1e}" if value else "0"


def _cache_section(kv: Mapping[str, KVStats], summary: StatsSummary) -> str:
    if not kv:
        return section("Keys and values", paragraph("No keys and values were observed."))
    series = []
    for letter in ("k", "v"):
        heads = {
            float(split_layer(f"{name}.x")[0]): (one.k_amax if letter == "k" else one.v_amax).max(axis=0, initial=0.0)
            for name, one in sorted(kv.items(), key=lambda pair: _running_order(pair[0]))
        }
        points = [(layer, float(found.max(initial=0.0))) for layer, found in heads.items()]
        bands = [
            (layer, float(found.min(initial=math.inf)), float(found.max(initial=0.0))) for layer, found in heads.items()
        ]
        series.append(Series(letter.upper(), points, bands))
    caption = "Largest magnitude of K, after rotary embedding, and of V, by layer; shaded: the range over heads"
    rows = [(one.tensor, span(one.amax, number), span([one.scale], number)) for one in summary.caches]
    return section(
        "Keys and values",
        _layer_chart(caption, series, "amax"),
        folded("The numbers of this chart", table(("cache", "amax by head", f"scale by {summary.history_rule}"), rows)),
    )


def _convergence_section(stats: ActivationStats, summary: StatsSummary) -> str:
    slowest: dict[str, list[InputSummary]] = {}
    for one in sorted(summary.inputs, key=_restlessness, reverse=True):
        if one.amax > 0:
            slowest.setdefault(fused_group(one.module), []).append(one)
    series = [_curve(stats, group, summary.history_rule) for group in list(slowest.values())[:6]]
    caption = (
        f"Running scale by the rule {summary.history_rule}, relative to the final one; the inputs that settled last"
    )
    x, y = Axis("sequences"), Axis("scale / final scale")
    note = "A flat end means that more text of this kind would not change the scale; other text may."
    chart = figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width, markers=False))
    return section("Convergence", chart, paragraph(note))


def _restlessness(one: InputSummary) -> tuple[bool, float]:
    """Sorts scales that have not settled above those that did late."""
    moved = one.convergence
    return (not moved.settled, moved.change if not moved.settled else float(moved.settled_after or 0))


def _curve(stats: ActivationStats, group: Sequence[InputSummary], rule: HistoryRule) -> Series:
    module = stats.inputs[group[0].module]
    seen = np.flatnonzero(module.tokens > 0)
    running = rule.running(module.amax[seen])
    final = running[-1]
    points = [(float(index + 1), float(value / final)) for index, value in zip(seen, running, strict=True) if final > 0]
    return Series(_joined(one.module for one in group), points)


def _held_out_section(inputs: Sequence[InputSummary], held_out: ActivationStats | None) -> str:
    if held_out is None:
        return section("Held-out text", paragraph("Nothing was held out: what the scales do to new text is not known."))
    measured = {one.module: (one, one.lost) for one in inputs if one.lost is not None}
    groups = [(_joined(names), *measured[names[0]]) for names in _sharing(measured).values()]
    worst = sorted(groups, key=lambda group: (-group[2].saturated, -group[2].flushed))[:_WORST]
    most = max((lost.saturated for _, _, lost in worst), default=0.0)
    rows: list[list[Cell]] = [
        [
            name,
            _meter_cell(lost.saturated, most),
            fraction(lost.flushed),
            number(held_out.inputs[one.module].max),
            span([one.scale and one.scale * E4M3.max], number),
        ]
        for name, one, lost in worst
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
    for one in inputs:
        if expert_group(one.module):
            tokens[one.module.rpartition(".")[0]] = one.tokens
    if not tokens:
        return ""
    fewest = sorted(tokens.items(), key=lambda pair: pair[1])[:_WORST]
    bars = [Bar(name, float(count), f"{count:,}") for name, count in fewest]
    caption = f"Tokens routed to the {len(bars)} experts that saw the fewest, of {len(tokens)}"
    floor = (float(DEFAULT_MIN_TOKENS), f"floor: {DEFAULT_MIN_TOKENS}")
    draw = figure(caption, lambda width: bar_chart(bars, title=caption, axis=Axis("tokens"), mark=floor, width=width))
    return section("Experts", draw)
