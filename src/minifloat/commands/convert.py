"""The command `convert`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from minifloat.commands.options import (
    FOLDER,
    MODEL,
    WritingParams,
    pass_params,
    print_json,
    revision_option,
    writing_options,
)


@dataclass(frozen=True)
class ConvertParams(WritingParams):
    """The parameters of `convert`, named as its options."""

    model: str
    out: Path
    revision: str | None
    layout: str | None
    dequantize: bool
    dtype: str | None
    allow_rounding: bool


@click.command()
@click.argument("model", type=MODEL)
@click.argument("out", type=FOLDER)
@revision_option()
@click.option("--layout", metavar="NAME", help="compressed-tensors, fp8 (DeepSeek), modelopt or mxfp8 (SGLang).")
@click.option("--dequantize", is_flag=True, help="Write plain weights instead.")
@click.option("--dtype", metavar="NAME", help="Of plain weights: bfloat16, float16, float32.  [default: config.json's]")
@click.option("--allow-rounding", is_flag=True, help="Round NVFP4 scales whose reciprocal is no float32.")
@writing_options
@pass_params(ConvertParams)
def convert(params: ConvertParams) -> None:
    """Write the quantized checkpoint MODEL in another layout, or dequantized, into the new folder OUT.

    Codes and scales keep their values, or the conversion is refused before anything is written, with the reason.
    """
    from minifloat.commands.progress import announce, progress_bar
    from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
    from minifloat.quantize.convert.document import document
    from minifloat.report import terminal

    with progress_bar(enabled=not (params.quiet or params.as_json), in_bytes=True) as progress:
        report = convert_checkpoint(
            params.model,
            params.out,
            params.layout,
            ConvertOptions(
                dequantize=params.dequantize,
                dtype=params.dtype,
                allow_rounding=params.allow_rounding,
                overwrite=params.overwrite,
                workers=params.workers,
                revision=params.revision,
            ),
            progress=progress,
            announce=None if params.quiet else announce,
        )
    if params.as_json:
        print_json(report)
    elif not params.quiet:
        terminal.write(document(report, verbose=params.verbose))
