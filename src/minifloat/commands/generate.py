"""The command `generate`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from minifloat.commands.options import (
    COUNT,
    MODEL,
    activations_option,
    deterministic_option,
    device_option,
    lm_head_option,
    pass_params,
    revision_option,
    threads_option,
    use_threads,
)


@dataclass(frozen=True)
class GenerateParams:
    """The parameters of `generate`, named as its options."""

    model: str
    prompt: str
    revision: str | None
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    weight_only: bool
    lm_head: str
    activations: str
    deterministic: bool
    device: str
    threads: int | None


@click.command()
@click.argument("model", type=MODEL)
@click.argument("prompt")
@revision_option()
@click.option("--max-new-tokens", "-n", default=128, show_default=True, type=COUNT)
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", type=int, help="For sampling.")
@click.option("--weight-only", is_flag=True, help="Do not quantize inputs, whatever the checkpoint says.")
@lm_head_option()
@activations_option()
@deterministic_option()
@device_option()
@threads_option()
@pass_params(GenerateParams)
def generate(params: GenerateParams) -> None:
    """Continue PROMPT with the checkpoint MODEL, quantized or not, streaming the text."""
    pieces = _pieces(params)
    click.echo(params.prompt, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()


def _pieces(params: GenerateParams) -> Iterator[str]:
    """Return the pieces of the continuation."""
    from minifloat.checkpoint.hub import model_folder
    from minifloat.serve.native_text import native_pieces, open_text_model
    from minifloat.serve.starting import starting

    folder = model_folder(params.model, revision=params.revision)
    with starting():
        use_threads(params.threads)
        model = open_text_model(
            folder,
            device=params.device,
            weight_only=params.weight_only,
            lm_head=params.lm_head,
            activations=params.activations,
            deterministic=params.deterministic,
        )
    from minifloat.engine import Engine, SamplingParams

    if isinstance(model, Engine):
        sampling = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, seed=params.seed, max_tokens=params.max_new_tokens
        )
        return native_pieces(model, params.prompt, sampling)
    from minifloat.serve.text import generate as stream

    return stream(
        model,
        params.prompt,
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
    )
