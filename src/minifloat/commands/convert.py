"""The command `convert`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from minifloat.commands.options import FOLDER, MODEL, json_option, revision_option, show, verbose_option
from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.quantize.options import ConvertOptions, GgufOptions


@click.command(cls=GroupedCommand)
@click.argument("model", type=MODEL)
@click.argument("out", type=FOLDER)
@revision_option()
@click.option(
    "--layout", metavar="NAME", help="compressed-tensors, fp8 (DeepSeek), modelopt, mxfp8 (SGLang), mlx or gguf."
)
@options_from(ConvertOptions, without=("revision",))
@options_from(GgufOptions, group="GGUF", prefix="gguf_", pre_tokenizer={"metavar": "NAME"})
@verbose_option()
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@json_option()
def convert(
    model: str, out: Path, layout: str | None, verbose: bool, quiet: bool, as_json: bool, **values: Any
) -> None:
    """Write the quantized checkpoint MODEL in another layout, or dequantized, into the new folder OUT.

    With --layout gguf, OUT is a file of llama.cpp, or the folder that it is put into.

    Codes and scales keep their values, or the conversion is refused before anything is written, with the reason.
    """
    from minifloat.commands.progress import announce, progress_bar
    from minifloat.quantize.convert import convert_checkpoint
    from minifloat.quantize.convert.document import document

    with progress_bar(enabled=not (quiet or as_json), in_bytes=True) as progress:
        report = convert_checkpoint(
            model,
            out,
            layout,
            build(ConvertOptions, values),
            gguf=build(GgufOptions, values, "gguf_"),
            progress=progress,
            announce=None if quiet else announce,
        )
    show(report, partial(document, verbose=verbose), as_json=as_json, quiet=quiet)
