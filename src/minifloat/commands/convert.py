"""The command `convert`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from minifloat.commands.options import MODEL, revision_option


@click.command()
@click.argument("model", type=MODEL)
@click.argument("out", type=click.Path(path_type=Path))
@revision_option()
@click.option("--layout", metavar="NAME", help="compressed-tensors, fp8 (DeepSeek), modelopt or mxfp8 (SGLang).")
@click.option("--dequantize", is_flag=True, help="Write plain weights instead.")
@click.option("--dtype", metavar="NAME", help="Of plain weights: bfloat16, float16, float32.  [default: config.json's]")
@click.option("--allow-rounding", is_flag=True, help="Round NVFP4 scales whose reciprocal is no float32.")
@click.option("--workers", type=click.IntRange(min=1), help="Threads.  [default: one per core, at most 8]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists, at the very end.")
@click.option("--verbose", "-v", is_flag=True, help="Print every tensor instead of a summary by layer.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def convert(
    model: str,
    out: Path,
    revision: str | None,
    layout: str | None,
    dequantize: bool,
    dtype: str | None,
    allow_rounding: bool,
    workers: int | None,
    overwrite: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the quantized checkpoint MODEL in another layout, or dequantized, into the new folder OUT.

    Codes and scales keep their values, or the conversion is refused before anything is written, with the reason.
    """
    from minifloat.commands.display.console import progress_bar
    from minifloat.commands.display.convert import print_convert_report
    from minifloat.convert import convert_checkpoint

    with progress_bar(enabled=not (quiet or as_json)) as progress:
        report = convert_checkpoint(
            model,
            out,
            layout,
            dequantize=dequantize,
            dtype=dtype,
            allow_rounding=allow_rounding,
            overwrite=overwrite,
            workers=workers,
            progress=progress,
            revision=revision,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        print_convert_report(report, verbose=verbose)
