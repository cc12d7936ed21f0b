"""The command `push`. Nothing heavy is imported before it runs, and no torch at all."""

from __future__ import annotations

import sys
from typing import Any

import click

from minifloat.commands.options import json_option, show
from minifloat.commands.options_from import build, options_from
from minifloat.deploy.options import PushOptions


@click.command()
@click.argument("folder", type=click.Path())
@click.argument("repo_id", metavar="ORG/NAME")
@options_from(PushOptions)
@json_option()
def push(folder: str, repo_id: str, as_json: bool, **values: Any) -> None:
    """Upload the checkpoint FOLDER, or a folder of GGUF files, to the hub, as ORG/NAME.

    Weights, config, tokenizer, card, licence and the report of `quantize` are uploaded; other files in FOLDER are not.
    The token comes from HF_TOKEN or `hf auth login`.
    """
    from huggingface_hub.utils import disable_progress_bars

    from minifloat.deploy.publish import document, push_checkpoint

    if as_json or not sys.stderr.isatty():
        disable_progress_bars()
    report = push_checkpoint(folder, repo_id, build(PushOptions, values))
    show(report, document, as_json=as_json)
