"""The command `plan`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json

import click

from minifloat.commands.options import MODEL, revision_option

_GIGA, _TERA = 10**9, 10**12
_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("model", type=MODEL)
@revision_option()
@click.option("--scheme", default="all", show_default=True, metavar="NAME|all", help="What to quantize to.")
@click.option("--hardware", default="cpu", show_default=True, metavar="NAME", help="cpu (this machine), h100, ...")
@click.option("--gpus", default=1, show_default=True, type=click.IntRange(min=1), help="Tensor parallelism.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of a sequence.  [default: 4096, or what it has]")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(min=1), help="Sequences at a time.")
@click.option("--kv-cache-dtype", default="bfloat16", show_default=True, help="bfloat16 or fp8.")
@click.option("--keep-free", default=0.1, show_default=True, type=click.FloatRange(0, 1, max_open=True))
@click.option("--bandwidth", type=_POSITIVE, metavar="GB/S", help="In place of the data sheet's, or of measuring it.")
@click.option("--peak", type=_POSITIVE, metavar="TFLOP/S", help="Dense BF16 peak in place of the data sheet's.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def plan(
    model: str,
    revision: str | None,
    scheme: str,
    hardware: str,
    gpus: int,
    context: int | None,
    batch: int,
    kv_cache_dtype: str,
    keep_free: float,
    bandwidth: float | None,
    peak: float | None,
    as_json: bool,
) -> None:
    """Say what MODEL will cost before anything runs: bytes, what fits, and how fast it can be at best.

    Reads config and headers only; a folder with a config.json and no weights will do, and so will a checkpoint that is
    quantized already. Figures of time are bounds by
    bandwidth and peak arithmetic (roofline), which no engine quite reaches: `bench` measures.
    """
    from minifloat.commands.display.plan import print_plan
    from minifloat.plan import plan_model

    planned = plan_model(
        model,
        scheme,
        hardware,
        gpus=gpus,
        context=context,
        batch=batch,
        kv_cache_dtype=kv_cache_dtype,
        keep_free=keep_free,
        bandwidth=None if bandwidth is None else bandwidth * _GIGA,
        peak=None if peak is None else peak * _TERA,
        revision=revision,
    )
    if as_json:
        click.echo(json.dumps(planned.to_dict(), indent=2))
    else:
        print_plan(planned)
