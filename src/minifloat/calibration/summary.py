"""Summaries of activation statistics: scales, convergence, saturation of held-out text, and warnings per module.

`calibration.document` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from minifloat._version import __version__
from minifloat.calibration.rules import Rule
from minifloat.calibration.scales import (
    DEFAULT_MIN_TOKENS,
    Convergence,
    ConvergenceReport,
    KVScales,
    Saturation,
    StaticScales,
    activation_scales,
    convergence_report,
    kv_scales,
    saturation,
)
from minifloat.calibration.stats import SCHEMA_VERSION, ActivationStats
from minifloat.errors import NotCalibratedError, StatsError
from minifloat.model.architecture.roles import fused_group
from minifloat.report.text import brief, split_layer

#: The linears of a layer in the order in which they run; other linears come after them.
_LINEARS = ("q", "k", "v", "o", "gate", "w1", "up", "w3", "down", "w2")


def running_order(module: str) -> tuple[Any, ...]:
    """Return a sort key that orders modules as a decoder runs them: by layer, attention first, then experts."""
    parent, _, leaf = module.rpartition(".")
    numbered = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parent.split(".")]
    role = leaf.removesuffix("_proj")
    rank = _LINEARS.index(role) if role in _LINEARS else len(_LINEARS)
    return split_layer(module)[0], "attn" not in parent, numbered, rank, leaf


def group_by_input(modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules that share an input, by the name of their group, in the order of `modules`."""
    groups: dict[str, list[str]] = {}
    for name in modules:
        groups.setdefault(fused_group(name), []).append(name)
    return groups


def joined(names: Iterable[str]) -> str:
    """Return names with a common parent as one text: ``self_attn.q_proj / k_proj / v_proj``."""
    first, *others = sorted(set(names), key=running_order)
    return " / ".join([first, *(name.rpartition(".")[2] for name in others)])


_NAMES_IN_WARNING = 8

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class InputSummary:
    module: str
    tokens: int
    amax: float
    scale: float | None  # the static scale by the rule; None if it has no scale, for the reason in `problem`
    against_max: float | None  # ``scale / (scale by the rule max) - 1``; None without a scale
    lost: Saturation | None  # saturation of held-out text with this scale; None without held-out text for this module
    convergence: Convergence
    problem: str = ""


@dataclass(frozen=True)
class CacheSummary:
    """K or V of one attention."""

    tensor: str
    amax: tuple[float, ...]
    scale: float | None  # the static scale by the rule; None if all values were zero
    convergence: Convergence


@dataclass(frozen=True)
class StatsSummary:
    inputs: tuple[InputSummary, ...]
    caches: tuple[CacheSummary, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values; a change that is not finite becomes None."""
        return {
            "inputs": [_finite(asdict(row)) for row in self.inputs],
            "kv_cache": [_finite(asdict(row)) for row in self.caches],
            "warnings": list(self.warnings),
        }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose convergence is JSON, which has no infinity."""
    moved = row["convergence"]
    return row | {"convergence": moved | {"change": moved["change"] if math.isfinite(moved["change"]) else None}}


def summarize(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None = None) -> StatsSummary:
    """Return the summary of activation statistics, module by module."""
    if held_out is not None and (differences := stats.model.differences(held_out.model)):
        raise StatsError("held-out statistics", f"they are of another model, it differs in {', '.join(differences)}")
    moved = convergence_report(stats)
    scales, refused = _without_refused(lambda names: activation_scales(stats, rule, modules=names), stats.inputs)
    max_scales, _ = _without_refused(lambda names: activation_scales(stats, modules=names), stats.inputs)
    inputs = tuple(
        _summarize_input(name, stats, scales, max_scales, refused.get(name, ""), held_out, moved)
        for name in sorted(stats.inputs, key=running_order)
    )
    caches = tuple(_summarize_caches(stats, moved))
    return StatsSummary(inputs, caches, tuple(_warnings(stats, inputs, caches, moved)))


def _without_refused(compute: Callable[[list[str]], _Result], modules: Iterable[str]) -> tuple[_Result, dict[str, str]]:
    """Return the result of `compute` for all modules that it accepts, and its reason for refusing each other module."""
    names, reasons = list(modules), dict[str, str]()
    while True:
        try:
            return compute(names), reasons
        except NotCalibratedError as error:
            reason = str(error).rpartition(": ")[2]
            reasons |= dict.fromkeys(error.modules, reason)
            names = [name for name in names if name not in reasons]


def _summarize_input(
    name: str,
    stats: ActivationStats,
    scales: StaticScales,
    max_scales: StaticScales,
    reason: str,
    held_out: ActivationStats | None,
    moved: ConvergenceReport,
) -> InputSummary:
    module = stats.inputs[name]
    scale = scales.scales.get(name)
    lost = None
    if scale is not None and held_out is not None and name in held_out.inputs and held_out.inputs[name].total_tokens:
        lost = saturation(held_out.inputs[name], float(scale))
    return InputSummary(
        module=name,
        tokens=module.total_tokens,
        amax=module.max,
        scale=None if scale is None else float(scale),
        against_max=None if scale is None else float(scale) / float(max_scales.scales[name]) - 1.0,
        lost=lost,
        convergence=moved.scales[f"{name}.input_scale"],
        problem=reason or scales.fallbacks.get(name, ""),
    )


def _summarize_caches(stats: ActivationStats, moved: ConvergenceReport) -> Iterator[CacheSummary]:
    scales, _ = _without_refused(lambda names: kv_scales(stats, modules=names), stats.kv)
    for name in sorted(stats.kv, key=running_order):
        kv = stats.kv[name]
        pair: KVScales | tuple[None, None] = scales.get(name, (None, None))
        for letter, amax, scale in (("k", kv.k_amax, pair[0]), ("v", kv.v_amax, pair[1])):
            heads = tuple(float(head) for head in amax.max(axis=0, initial=0.0))
            scale_value = None if scale is None else float(scale)
            yield CacheSummary(f"{name}.{letter}", heads, scale_value, moved.scales[f"{name}.{letter}_scale"])


def _warnings(
    stats: ActivationStats, inputs: Sequence[InputSummary], caches: Sequence[CacheSummary], moved: ConvergenceReport
) -> Iterator[str]:
    uncalled = [row.module for row in inputs if not row.tokens]
    if uncalled:
        groups = [joined(group) for group in group_by_input(uncalled).values()]
        yield f"Never called ({len(uncalled)} modules): {_listing(groups)}."
    no_scale = [row.module for row in inputs if row.tokens and row.scale is None]
    no_scale += [row.tensor for row in caches if row.scale is None]
    if no_scale:
        yield f"No scale, for nothing but zeros were seen ({len(no_scale)}): {_listing(no_scale)}."
    starved = {
        row.module.rpartition(".")[0]: f"{row.module.rpartition('.')[0]} ({row.tokens})"
        for row in inputs
        if row.problem and row.scale is not None
    }
    if starved:
        yield (
            f"Experts that saw fewer than {DEFAULT_MIN_TOKENS} tokens borrow the largest amax among the experts of "
            f"their layer ({len(starved)} experts, with their tokens): {_listing(list(starved.values()))}."
        )
    if stats.sequences <= moved.window:
        yield (
            f"Too few sequences to tell whether the scales have settled: {stats.sequences}, "
            f"where more than {moved.window} are needed."
        )
        return
    moving = [name for name in moved.unsettled if math.isfinite(moved.scales[name].change)]
    if moving:
        scale_names = {name.removesuffix(".input_scale"): name for name in moving}
        changes = [
            f"{joined(group)} ({moved.scales[scale_names[group[0]]].change:.1%})"
            for group in group_by_input(scale_names).values()
        ]
        yield (
            f"Not settled within {moved.tolerance:.0%} over the last {moved.window} sequences "
            f"({len(moving)} of {len(moved.scales)} scales, with how far they moved): {_listing(changes)}. "
            "Calibrate on more text."
        )


def _listing(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_WARNING
    return ", ".join(names[:_NAMES_IN_WARNING]) + (f" and {more} more" if more > 0 else "")


def run_facts(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None) -> list[tuple[str, str]]:
    """Return model, data, rule and versions of a calibration, as names and values."""
    lines = [
        ("model", stats.model.architecture),
        ("weights", f"sampled sha256 {stats.model.weights[:16]}"),
        ("data", f"{stats.sequences:,} sequences, {stats.tokens:,} tokens"),
        *(("", line) for line in _data_lines(stats.data)),
        ("rule", f"{rule} ({rule.summary})"),
    ]
    if held_out is not None:
        lines.append(("held out", f"{held_out.sequences:,} sequences, {held_out.tokens:,} tokens"))
    return [*lines, ("versions", f"minifloat {__version__}, statistics {SCHEMA_VERSION}")]


def _data_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the record of a calibration set as text, including keys that this version does not know."""
    sources = data.get("sources")
    for source in sources if isinstance(sources, list) else []:
        yield _source_line(source) if isinstance(source, Mapping) else str(source)
    rest = {key: value for key, value in data.items() if key not in {"sources", "sequences", "tokens"}}
    if rest:
        yield ", ".join(f"{key} {brief(value)}" for key, value in rest.items())


def _source_line(source: Mapping[str, Any]) -> str:
    details = {key: value for key, value in source.items() if key != "name" and value is not None}
    return f"{source.get('name', 'text')}: " + ", ".join(f"{key} {brief(value)}" for key, value in details.items())


def settled_text(convergences: Sequence[Convergence]) -> str:
    """Return after how many sequences the slowest scale settled, or how many scales have not settled."""
    judged = [entry for entry in convergences if entry.settled or math.isfinite(entry.change)]
    moving = sum(not entry.settled for entry in judged)
    if not moving:
        return str(max(entry.settled_after or 0 for entry in judged)) if judged else "-"
    return "no" if len(judged) == 1 else f"no: {moving} of {len(judged)}"
