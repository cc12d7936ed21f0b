"""The command `check`. Nothing heavy is imported before it runs, and no torch at all."""

from __future__ import annotations

import sys
from typing import Any

import click

from minifloat.commands.options import (
    COUNT,
    MODEL,
    complete_scheme,
    json_option,
    override_options,
    overrides_of,
    revision_option,
    show,
)


@click.command()
@click.argument("model", type=MODEL)
@revision_option()
@click.option(
    "--engine",
    required=True,
    metavar="NAME",
    help="vllm, sglang, tensorrt-llm, transformers, minifloat, mlx, llama.cpp or ollama.",
)
@click.option(
    "--hardware",
    required=True,
    metavar="NAME",
    help="cpu (with AMX), cpu-no-amx, a100, l40s, h100, h200, b200 or mi300; for mlx, llama.cpp and ollama also apple.",
)
@click.option("--tp", default=1, show_default=True, type=COUNT, help="GPUs that share every matrix.")
@click.option("--plugin", metavar="NAME", help="A plugin of the engine: minifloat, for vllm on a CPU.")
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    metavar="NAME",
    help="For a model that is not quantized: what to quantize it to.",
)
@click.option("--layout", metavar="NAME", help="With --scheme, as for `quantize`.")
@override_options("With --scheme. ")
@json_option()
def check(
    model: str,
    revision: str | None,
    engine: str,
    hardware: str,
    tp: int,
    plugin: str | None,
    override: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
    **of_scheme: Any,
) -> None:
    """Say whether an engine will load the checkpoint or GGUF file MODEL, which kernel it uses, and what goes wrong.

    Reads headers and config; starts nothing. With --scheme, the checkpoint that `quantize` would make of MODEL is
    checked. Exit status 0: the engine loads it; 1: it does not, or its answers would be wrong; 3: not known.
    """
    from minifloat.deploy.check import LoadVerdict, Target, check_checkpoint
    from minifloat.deploy.check.document import document

    report = check_checkpoint(
        model,
        Target.of(engine, hardware, tp, plugin),
        overrides=overrides_of(override, exclude),
        revision=revision,
        **of_scheme,
    )
    show(report, document, as_json=as_json)
    if report.failures:
        sys.exit(1)
    if report.verdict is LoadVerdict.UNKNOWN:
        sys.exit(3)
