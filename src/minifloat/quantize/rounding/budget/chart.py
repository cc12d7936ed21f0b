"""The chart of a budget: KL divergence against bits per weight, as predicted and as measured."""

from __future__ import annotations

from minifloat.quantize.rounding.budget.search import WithinBudget
from minifloat.report.axes import Axis
from minifloat.report.charts import Series, line_chart


def budget_chart(result: WithinBudget) -> str:
    """Return the chart as SVG."""
    points = sorted((mixture.bits, mixture.kl) for mixture in result.measured)
    return line_chart(
        [Series("least that the damages of groups predict", result.frontier), Series("measured", points)],
        title="KL divergence from the original model on held-out text, by bits per weight",
        x=Axis("bits per weight"),
        y=Axis("KL divergence, nats per token", log=True),
    )
