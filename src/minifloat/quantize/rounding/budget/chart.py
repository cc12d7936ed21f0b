"""The chart of a budget: KL divergence against bits per weight, as predicted and as measured."""

from __future__ import annotations

from minifloat.quantize.rounding.budget.search import WithinBudget
from minifloat.report.document import Axis, Figure, Lines, Series
from minifloat.report.figures import draw


def budget_chart(result: WithinBudget) -> str:
    """Return the chart as an SVG file."""
    points = sorted((mixture.bits, mixture.kl) for mixture in result.measured)
    series = [Series("least that the damages of groups predict", result.frontier), Series("measured", points)]
    chart = Lines(series, Axis("bits per weight"), Axis("KL divergence, nats per token", log=True))
    return draw(Figure("KL divergence from the original model on held-out text, by bits per weight", chart), alone=True)
