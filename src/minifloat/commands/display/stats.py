"""How activation statistics look on a terminal. The numbers are those of the page (`calibration.page`)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from minifloat.calibration.page import (
    CacheSummary,
    InputSummary,
    change,
    fraction,
    number,
    run_facts,
    settled_text,
    span,
    summarize,
)
from minifloat.calibration.rules import Rule
from minifloat.calibration.stats import ActivationStats
from minifloat.commands.display.console import make_console, make_table
from minifloat.report.text import layer_pattern


def print_stats(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None, *, verbose: bool) -> None:
    """What was run, a row per kind of module, the KV cache by layer, and what to know before using the scales.

    Args:
        stats: What calibration saw.
        rule: Statistics to amax.
        held_out: What a run over other text saw, with histograms; None: nothing was held out.
        verbose: A row per module instead of one for the same module of all layers.

    Raises:
        UsageError: The rule, or the held-out text, needs histograms and there are none.
        StatsError: The held-out run is of another model.
    """
    summary = summarize(stats, rule, held_out)
    console = make_console()
    for name, value in run_facts(stats, rule, held_out):
        console.print(escape(f"{name:<9} {value}"), soft_wrap=True)
    console.print()
    console.print(_input_table(summary.inputs, verbose=verbose))
    if summary.history_rule is not rule:
        console.print(
            f"\nBy the rule {summary.history_rule}, as histograms do not tell it: when scales settled, the cache."
        )
    if summary.caches:
        console.print()
        console.print(_cache_table(summary.caches))
    for warning in summary.warnings:
        console.print(escape(f"\nWarning: {warning}"), soft_wrap=True)


def _input_table(inputs: Sequence[InputSummary], *, verbose: bool) -> Table:
    groups: dict[str, list[InputSummary]] = {}
    for one in inputs:
        groups.setdefault(one.module if verbose else layer_pattern(one.module), []).append(one)
    numbers = ("count", "tokens", "amax", "scale", "vs max", "saturated", "flushed", "settled after")
    table = make_table("input of", *numbers, "note", right=numbers)
    for column in (table.columns[0], table.columns[-1]):
        column.no_wrap, column.overflow = False, "fold"  # where there is little room, names give way, never numbers
    for name, group in groups.items():
        table.add_row(
            escape(name),
            str(len(group)),
            f"{min(one.tokens for one in group):,}",
            number(max(one.amax for one in group)),
            span((one.scale for one in group), number),
            span((one.against_max for one in group), change),
            *_lost_cells(group),
            settled_text([one.convergence for one in group]),
            escape(_note(group)),
        )
    return table


def _lost_cells(group: Sequence[InputSummary]) -> tuple[str, str]:
    """The worst of a group."""
    lost = [one.lost for one in group if one.lost is not None]
    if not lost:
        return ("", "")
    return (fraction(max(one.saturated for one in lost)), fraction(max(one.flushed for one in lost)))


def _note(group: Sequence[InputSummary]) -> str:
    """How many have no scale, or borrowed one."""
    if len(group) == 1 and group[0].scale is None:
        return "no scale: only zeros" if group[0].tokens else "no scale: never called"
    missing = sum(one.scale is None for one in group)
    borrowed = sum(one.scale is not None and bool(one.problem) for one in group)
    return ", ".join(f"{count} {what}" for count, what in ((missing, "no scale"), (borrowed, "borrowed")) if count)


def _cache_table(caches: Sequence[CacheSummary]) -> Table:
    numbers = ("heads", "amax by head", "scale", "settled after")
    table = make_table("cache", *numbers, right=numbers)
    for one in caches:
        table.add_row(
            escape(one.tensor),
            str(len(one.amax)),
            span(one.amax, number),
            span([one.scale], number),
            settled_text([one.convergence]),
        )
    return table
