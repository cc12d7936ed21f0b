"""The command line: each command parses its options, calls one public function and prints what it returns.

Nothing heavy is imported here; a command imports what it needs when it runs, so `--help` answers at once. A user's
mistake is one line on standard error and exit status 2 (`--debug` shows the traceback); Ctrl-C is 130.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from minifloat._version import __version__
from minifloat.errors import MinifloatError
from minifloat.scheme import DEFAULT_SCHEME, SCHEMES

_EXISTING_FOLDER = click.Path(path_type=Path)


class _Commands(click.Group):
    """A group that turns our errors into one line, and lists commands in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MinifloatError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"minifloat: error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("\nminifloat: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="minifloat")
def main(debug: bool) -> None:
    """Quantize language models to FP8 and FP4, and prove that they are still the same models."""


def _scheme_help() -> str:
    return "\n".join(["\b", "Schemes:"] + [f"  {scheme.name:<12} {scheme.summary}" for scheme in SCHEMES.values()])


@main.command(epilog=_scheme_help())
@click.argument("model", type=_EXISTING_FOLDER)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--scheme", default=DEFAULT_SCHEME, show_default=True, metavar="NAME", help="What to quantize to.")
@click.option(
    "--layout", default="compressed-tensors", show_default=True, help="compressed-tensors, or fp8 (DeepSeek)."
)
@click.option("--override", multiple=True, metavar="REGEX=SCHEME|bf16", help="For modules that match; the last wins.")
@click.option(
    "--exclude", multiple=True, metavar="REGEX", help="Keep these modules: short for --override 'REGEX=bf16'."
)
@click.option("--workers", type=click.IntRange(min=1), help="Threads.  [default: one per core, at most 8]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists, at the very end.")
@click.option("--verbose", "-v", is_flag=True, help="Print every tensor instead of a summary by layer.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def quantize(
    model: Path,
    out: Path,
    scheme: str,
    layout: str,
    override: tuple[str, ...],
    exclude: tuple[str, ...],
    workers: int | None,
    overwrite: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Quantize the checkpoint MODEL into the new folder OUT.

    Weights are streamed: memory stays small whatever the size of the model. A run that is interrupted, even killed,
    leaves no half checkpoint behind: the same command continues it.
    """
    from minifloat.display import print_quantize_report, progress_bar
    from minifloat.quantize.model import quantize_checkpoint
    from minifloat.quantize.plan import KEEP

    with progress_bar(enabled=not (quiet or as_json)) as progress:
        report = quantize_checkpoint(
            model,
            out,
            scheme,
            layout=layout,
            overrides=[*override, *(f"{pattern}={KEEP}" for pattern in exclude)],
            workers=workers,
            overwrite=overwrite,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        print_quantize_report(report, verbose=verbose)


@main.command()
@click.argument("model", type=_EXISTING_FOLDER)
@click.option("--verbose", "-v", is_flag=True, help="Print every tensor instead of a summary by layer.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def inspect(model: Path, verbose: bool, as_json: bool) -> None:
    """Show what the checkpoint MODEL holds: schemes, bytes, bits per weight. Reads headers only."""
    from minifloat.display import print_inspection
    from minifloat.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    if as_json:
        click.echo(json.dumps(inspection.to_dict(), indent=2))
    else:
        print_inspection(inspection, verbose=verbose)


@main.command()
@click.argument("baseline", type=_EXISTING_FOLDER)
@click.argument("candidate", type=_EXISTING_FOLDER)
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(path_type=Path), help="UTF-8 text file.")
@click.option("--window", type=click.IntRange(min=2), help="Tokens per window.  [default: 256]")
@click.option("--max-tokens", type=click.IntRange(min=2), help="Stop after this many tokens of each text.")
@click.option("--dtype", help="bfloat16, float16 or float32, for both.  [default: that of each config.json]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(
    baseline: Path,
    candidate: Path,
    texts: tuple[Path, ...],
    window: int | None,
    max_tokens: int | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Compare CANDIDATE with BASELINE on the same tokens: perplexity, KL divergence, top-1 agreement."""
    from minifloat.compare import compare_models
    from minifloat.display import print_comparison, progress_bar

    with progress_bar(enabled=not as_json) as progress:
        comparison = compare_models(
            baseline, candidate, texts, window=window, max_tokens=max_tokens, dtype=dtype, progress=progress
        )
    if as_json:
        click.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison)


@main.command()
@click.argument("model", type=_EXISTING_FOLDER)
@click.argument("prompt")
@click.option("--max-new-tokens", "-n", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", type=int, help="For sampling.")
def generate(model: Path, prompt: str, max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    """Continue PROMPT with the checkpoint MODEL, quantized or not, streaming the text."""
    from minifloat.serve.text import generate as stream

    click.echo(prompt, nl=False)
    for piece in stream(model, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
        click.echo(piece, nl=False)
    click.echo()


@main.command()
def doctor() -> None:
    """Show what this installation has: versions, the native kernels, and what is slower without them."""
    from minifloat.display import print_diagnosis
    from minifloat.doctor import diagnose

    print_diagnosis(diagnose())
