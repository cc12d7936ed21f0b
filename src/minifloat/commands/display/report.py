"""Prints the results beside a checkpoint in three tables, those of its report.html, and where it loads."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from minifloat.commands.display.console import make_console, make_table
from minifloat.deploy.check.engine_verdict import engine_verdicts
from minifloat.evaluate.checkpoint_report import Results
from minifloat.quantize.document import done_section
from minifloat.report import terminal
from minifloat.report.document import Document


def print_results(results: Results) -> None:
    """Print what was done, whether it is the same model, what was gained, and where it loads."""
    console = make_console()
    name = results.path.name
    if results.done is None:
        _say(console, "What was done: not known, the checkpoint has no minifloat.json.")
    else:
        terminal.write(Document("", [done_section(results.done)]), console)
    console.print()
    _print_comparison(console, results, f"minifloat compare MODEL {name}")
    console.print()
    _print_gains(console, results, f"minifloat bench {name} --baseline MODEL")
    console.print()
    for verdict in engine_verdicts(results.engines):
        _say(console, str(verdict))


def _print_comparison(console: Console, results: Results, command: str) -> None:
    if results.comparison is None:
        _say(console, f"Is it still the same model? Not measured yet: {command}")
        return
    from minifloat.evaluate.compare.pages.numbers import increase, with_interval
    from minifloat.evaluate.compare.pages.words import candidate_names, verdict_line

    comparison = results.comparison
    rows = []
    names = candidate_names(comparison)
    for name, candidate in zip(names, comparison.candidates, strict=True):
        overall = candidate.overall
        rows.append(
            [
                name,
                with_interval(increase(overall), as_percent=True, signed=True),
                with_interval(overall.kl_mean),
                with_interval(overall.same_top1, as_percent=True),
            ]
        )
    _print_table(console, ("is it the same model?", "perplexity", "KL, nats", "same top-1"), rows)
    for name, candidate in zip(names, comparison.candidates, strict=True):
        _say(console, f"{name}: {verdict_line(candidate)}")


def _print_gains(console: Console, results: Results, command: str) -> None:
    if results.gains is None:
        _say(console, f"What was gained: not measured yet: {command}")
        return
    from minifloat.evaluate.bench.page import gain_rows, gain_sentences

    _print_table(console, ("what was gained", "baseline", "quantized", "gain"), gain_rows(results.gains))
    for text in gain_sentences(results.gains):
        _say(console, text)
    if results.gains.doubts:
        _say(console, f"Not to be quoted: {' '.join(results.gains.doubts)}")


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = make_table(*columns, right=columns[1:])
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(escape(text), soft_wrap=True)
