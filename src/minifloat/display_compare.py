"""Comparisons on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minifloat.display import make_console, make_table

if TYPE_CHECKING:
    from minifloat.compare import Comparison, Estimate, Summary


def print_comparison(comparison: Comparison) -> None:
    """A table per candidate, one row per text and one for all, and its verdict."""
    console = make_console()
    numbers = ("tokens", "ppl base", "ppl", "change", "KL mean", "KL p99", "KL max", "top-1")
    for candidate in comparison.candidates:
        table = make_table("text", *numbers, right=numbers)
        for summary in candidate.summaries:
            table.add_row(*_row(summary))
        console.print(f"{candidate.model.name} (inputs: {candidate.model.activations})")
        console.print(table)
        console.print(f"Verdict: {candidate.verdict.outcome.value}\n")


def _row(summary: Summary) -> tuple[str, ...]:
    return (
        summary.name,
        f"{summary.tokens:,}",
        f"{summary.baseline_perplexity:.4g}",
        f"{summary.candidate_perplexity:.4g}",
        _interval(summary.perplexity_ratio.mapped(lambda ratio: 100 * (ratio - 1)), "{:+.2f}") + "%",
        _interval(summary.kl_mean, "{:.3g}"),
        f"{summary.kl_p99.value:.3g}",
        f"{summary.kl_max:.3g}",
        f"{summary.top1_agreement.value:.2%}",
    )


def _interval(estimate: Estimate, form: str) -> str:
    value, low, high = (form.format(number) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]" if estimate.known else value
