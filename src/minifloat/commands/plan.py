"""The command `plan`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from typing import Any

import click

from minifloat.commands.options import MODEL, complete_scheme, json_option, revision_option, show
from minifloat.commands.options_from import build, options_from
from minifloat.deploy.options import PlanOptions


@click.command()
@click.argument("model", type=MODEL)
@revision_option()
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    default="all",
    show_default=True,
    metavar="NAME|all",
    help="What to quantize to.",
)
@click.option(
    "--hardware",
    default="cpu",
    show_default=True,
    metavar="NAME",
    help="cpu (this machine), a100-40, a100-80, l40s, rtx4090, h100, h200, b200, mi300x, mi325x or mi355x.",
)
@options_from(PlanOptions, bandwidth={"metavar": "GB/S"}, peak={"metavar": "TFLOP/S"})
@json_option()
def plan(model: str, revision: str | None, scheme: str, hardware: str, as_json: bool, **values: Any) -> None:
    """Say what MODEL will cost before anything runs: bytes, what fits, and how fast it can be at best.

    Reads config and headers only. A folder with a config.json and no weights is enough; a quantized checkpoint works
    too. Times are lower bounds from bandwidth and peak arithmetic (roofline), which no engine quite reaches: `bench`
    measures.
    """
    from minifloat.deploy.estimate import plan_model
    from minifloat.deploy.estimate.document import document

    planned = plan_model(model, scheme, hardware, build(PlanOptions, values), revision=revision)
    show(planned, document, as_json=as_json)
