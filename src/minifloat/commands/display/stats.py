"""Prints activation statistics, with the numbers of the HTML page (`calibration.summary`)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from minifloat.calibration.rules import Rule
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.summary import (
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
from minifloat.commands.display.console import make_console, make_table
from minifloat.report.text import layer_pattern


def print_stats(stats: ActivationStats, rule: Rule, held_out: ActivationStats | None, *, verbose: bool) -> None:
    """Print facts of the run, the inputs of modules, the KV cache by layer, and warnings about the scales."""
    summary = summarize(stats, rule, held_out)
    console = make_console()
    for name, value in run_facts(stats, rule, held_out):
        console.print(escape(f"{name:<9} {value}"), soft_wrap=True)
    console.print()
    console.print(_input_table(summary.inputs, verbose=verbose))
    if summary.history_rule is not rule:
        console.print(
            f"\nBy the rule {summary.history_rule}, since histograms lack the data: when scales settled, and the cache."
        )
    if summary.caches:
        console.print()
        console.print(_cache_table(summary.caches))
    for warning in summary.warnings:
        console.print(escape(f"\nWarning: {warning}"), soft_wrap=True)


def _input_table(inputs: Sequence[InputSummary], *, verbose: bool) -> Table:
    groups: dict[str, list[InputSummary]] = {}
    for summary in inputs:
        groups.setdefault(summary.module if verbose else layer_pattern(summary.module), []).append(summary)
    numbers = ("count", "tokens", "amax", "scale", "vs max", "saturated", "flushed", "settled after")
    table = make_table("input of", *numbers, "note", right=numbers)
    for column in (table.columns[0], table.columns[-1]):
        column.no_wrap, column.overflow = False, "fold"  # on a narrow terminal names are folded, numbers never
    for name, group in groups.items():
        table.add_row(
            escape(name),
            str(len(group)),
            f"{min(member.tokens for member in group):,}",
            number(max(member.amax for member in group)),
            span((member.scale for member in group), number),
            span((member.against_max for member in group), change),
            *_lost_cells(group),
            settled_text([member.convergence for member in group]),
            escape(_note(group)),
        )
    return table


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


def _cache_table(caches: Sequence[CacheSummary]) -> Table:
    numbers = ("heads", "amax by head", "scale", "settled after")
    table = make_table("cache", *numbers, right=numbers)
    for cache in caches:
        table.add_row(
            escape(cache.tensor),
            str(len(cache.amax)),
            span(cache.amax, number),
            span([cache.scale], number),
            settled_text([cache.convergence]),
        )
    return table
