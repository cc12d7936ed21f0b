"""The command `check`. Nothing heavy is imported before it runs, and no torch at all."""

from __future__ import annotations

import json
import sys

import click

from minifloat.commands.options import MODEL, revision_option


@click.command()
@click.argument("model", type=MODEL)
@revision_option()
@click.option("--engine", required=True, metavar="NAME", help="vllm, sglang, transformers or minifloat.")
@click.option(
    "--hardware",
    required=True,
    metavar="NAME",
    help="cpu (with AMX), cpu-no-amx, a100, l40s, h100, h200, b200 or mi300.",
)
@click.option("--tp", default=1, show_default=True, type=click.IntRange(min=1), help="GPUs that share every matrix.")
@click.option("--scheme", metavar="NAME", help="For a model that is not quantized: what to quantize it to.")
@click.option("--layout", default="compressed-tensors", show_default=True, help="With --scheme, as for `quantize`.")
@click.option("--override", multiple=True, metavar="REGEX=SCHEME|bf16", help="With --scheme, as for `quantize`.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def check(
    model: str,
    revision: str | None,
    engine: str,
    hardware: str,
    tp: int,
    scheme: str | None,
    layout: str,
    override: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say whether an engine will load the checkpoint MODEL, which kernel it takes, and what goes wrong.

    Headers and config are read, nothing is started. With --scheme, what `quantize` would make of MODEL is judged.
    Exit status 0: it loads; 1: it does not, or answers wrongly; 3: not known.
    """
    from minifloat.check import Target, Verdict, check_checkpoint
    from minifloat.commands.display.check import print_check

    target = Target.of(engine, hardware, tp)
    report = check_checkpoint(model, target, scheme=scheme, layout=layout, overrides=override, revision=revision)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_check(report)
    if report.failures:
        sys.exit(1)
    if report.verdict is Verdict.UNKNOWN:
        sys.exit(3)
