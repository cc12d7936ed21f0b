"""Prints what is known of each scheme's loss, for the report of `plan`."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from minifloat.commands.display.console import make_table
from minifloat.deploy.estimate.known_loss import MEASURED_MODELS, KnownLoss, Measured
from minifloat.deploy.estimate.model_plan import ModelPlan, SchemeEstimate
from minifloat.model.plan.overrides import KEEP
from minifloat.numerics.scheme import SCHEMES

_NOT_MEASURED = "not measured"


def loss_table(plan: ModelPlan) -> Table:
    """Return the table of measured losses, a row per scheme."""
    names = [f"{model}: {what}" for model in MEASURED_MODELS for what in ("perplexity", "KL")]
    table = make_table("scheme", *names, right=names)
    for scheme in plan.schemes:
        if scheme.scheme in SCHEMES:
            by_model = {loss.model: loss for loss in scheme.losses}
            table.add_row(scheme.scheme, *(escape(cell) for m in MEASURED_MODELS for cell in _loss(by_model.get(m))))
    return table


def _loss(loss: KnownLoss | None) -> tuple[str, str]:
    """Return the change of perplexity and the KL divergence."""
    if loss is None:
        return _NOT_MEASURED, _NOT_MEASURED
    return _measured(loss.ppl_increase, "+.2%"), _NOT_MEASURED if loss.kl is None else _measured(loss.kl, ".4f")


def _measured(measured: Measured, style: str) -> str:
    if measured.low is None or measured.high is None:
        return format(measured.value, style)
    ends = [format(end, style).removesuffix("%").removeprefix("+") for end in (measured.low, measured.high)]
    return f"{measured.value:{style}} [{', '.join(ends)}]"


def loss_note(losses: list[KnownLoss]) -> str:
    """Say where the figures of the table come from."""
    texts, dates = ({getattr(loss, name) for loss in losses} for name in ("text", "date"))
    return (
        f"loss: change of perplexity and mean KL (nats per token) with 95% intervals on {', '.join(sorted(texts))}, "
        f"{', '.join(sorted(dates))}, of these two models\n(docs/results.md); they are small, and their weights were "
        "rounded to nearest. Yours may lose more or less: `minifloat compare` measures it."
    )


def quality_text(scheme: SchemeEstimate) -> str:
    """Say in parentheses what is known of the loss."""
    if scheme.scheme == KEEP:
        return " (the model as it is)"
    if not scheme.losses:
        return " (its loss was not measured)"
    first = scheme.losses[0]
    kl = "" if first.kl is None else f", KL {_measured(first.kl, '.4f')}"
    return f" (on {first.model}: perplexity {_measured(first.ppl_increase, '+.2%')}{kl})"
