"""The command `plan`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from dataclasses import dataclass

import click

from minifloat.commands.options import (
    COUNT,
    MODEL,
    POSITIVE,
    complete_scheme,
    json_option,
    pass_params,
    print_json,
    revision_option,
)


@dataclass(frozen=True)
class PlanParams:
    """The parameters of `plan`, named as its options."""

    model: str
    revision: str | None
    scheme: str
    hardware: str
    gpus: int
    context: int | None
    batch: int
    kv_cache_dtype: str
    keep_free: float
    bandwidth: float | None
    peak: float | None
    as_json: bool


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
@click.option("--hardware", default="cpu", show_default=True, metavar="NAME", help="cpu (this machine), h100, ...")
@click.option("--gpus", default=1, show_default=True, type=COUNT, help="Tensor parallelism.")
@click.option("--context", type=COUNT, help="Tokens of a sequence.  [default: 4096, or the model's maximum if less]")
@click.option("--batch", default=1, show_default=True, type=COUNT, help="Sequences at a time.")
@click.option("--kv-cache-dtype", default="bfloat16", show_default=True, help="bfloat16 or fp8.")
@click.option(
    "--keep-free",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Fraction of memory to leave unused.",
)
@click.option("--bandwidth", type=POSITIVE, metavar="GB/S", help="Instead of the data sheet's or a measured one.")
@click.option(
    "--peak", type=POSITIVE, metavar="TFLOP/S", help="Dense BF16 peak instead of the data sheet's or a measured one."
)
@json_option()
@pass_params(PlanParams)
def plan(params: PlanParams) -> None:
    """Say what MODEL will cost before anything runs: bytes, what fits, and how fast it can be at best.

    Reads config and headers only. A folder with a config.json and no weights is enough; a quantized checkpoint works
    too. Times are lower bounds from bandwidth and peak arithmetic (roofline), which no engine quite reaches: `bench`
    measures.
    """
    from minifloat.deploy.estimate import PlanOptions, plan_model
    from minifloat.deploy.estimate.document import document
    from minifloat.report import terminal

    options = PlanOptions(
        gpus=params.gpus,
        context=params.context,
        batch=params.batch,
        kv_cache_dtype=params.kv_cache_dtype,
        keep_free=params.keep_free,
        bandwidth=params.bandwidth,
        peak=params.peak,
    )
    planned = plan_model(params.model, params.scheme, params.hardware, options, revision=params.revision)
    if params.as_json:
        print_json(planned)
    else:
        terminal.write(document(planned))
