"""The command `generate`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from typing import Any

import click

from minifloat.commands.options import COUNT, MODEL, revision_option, threads_option, use_threads
from minifloat.commands.options_from import build, options_from
from minifloat.engine.options import EngineOptions


@click.command()
@click.argument("model", type=MODEL)
@click.argument("prompt")
@revision_option()
@click.option("--max-new-tokens", "-n", default=128, show_default=True, type=COUNT, help="Tokens to add at most.")
@click.option(
    "--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="Of sampling; 0: greedy."
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most probable tokens that have this probability together.",
)
@click.option("--seed", type=int, help="Seed of sampling.  [default: another one each time]")
@click.option("--weight-only", is_flag=True, help="Do not quantize inputs, whatever the checkpoint says.")
@options_from(
    EngineOptions,
    only=("device", "lm_head", "activations", "deterministic"),
    activations={
        "type": click.Choice(["bf16", "int8"]),
        "default": "bf16",
        "help": "Inputs of linears, for prompts. int8: rounded, faster, less exact.",
    },
)
@threads_option()
def generate(
    model: str, prompt: str, revision: str | None, weight_only: bool, threads: int | None, **values: Any
) -> None:
    """Continue PROMPT with the checkpoint MODEL, quantized or not, streaming the text."""
    from minifloat.checkpoint.hub import model_folder
    from minifloat.serve.starting import starting
    from minifloat.serve.text import generate as pieces_of
    from minifloat.serve.text import open_text_model

    options = build(EngineOptions, values)
    folder = model_folder(model, revision=revision)
    with starting():
        use_threads(threads)
        opened = open_text_model(folder, options, weight_only=weight_only)
    sampling = {name: values[name] for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    pieces = pieces_of(opened, prompt, **sampling)
    click.echo(prompt, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()
