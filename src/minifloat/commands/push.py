"""The command `push`. Nothing heavy is imported before it runs, and no torch at all."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from minifloat.commands.options import json_option, pass_params, print_json


@dataclass(frozen=True)
class PushParams:
    """The parameters of `push`, named as its options."""

    folder: str
    repo_id: str
    private: bool
    revision: str | None
    message: str | None
    create_pr: bool
    base_model: str | None
    license: str | None
    dry_run: bool
    as_json: bool


@click.command()
@click.argument("folder", type=click.Path())
@click.argument("repo_id", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make a new repository private; an existing one must be.")
@click.option("--revision", metavar="BRANCH", help="Commit to this branch.  [default: main]")
@click.option("--message", metavar="TEXT", help="Message of the commit.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--base-model", metavar="ID", help="The model it was made from, if its card does not say.")
@click.option("--license", metavar="NAME", help="Its licence, if its card does not say: apache-2.0, mit, other, ...")
@click.option("--dry-run", is_flag=True, help="List what would be uploaded; write and send nothing.")
@json_option()
@pass_params(PushParams)
def push(params: PushParams) -> None:
    """Upload the checkpoint FOLDER to the hub, as ORG/NAME.

    Weights, config, tokenizer, card, licence and the report of `quantize` are uploaded; other files in FOLDER are not.
    The token comes from HF_TOKEN or `hf auth login`.
    """
    from huggingface_hub.utils import disable_progress_bars

    from minifloat.deploy.publish import PushOptions, document, push_checkpoint
    from minifloat.report import terminal

    if params.as_json or not sys.stderr.isatty():
        disable_progress_bars()
    options = PushOptions(
        private=params.private,
        revision=params.revision,
        message=params.message,
        create_pr=params.create_pr,
        base_model=params.base_model,
        license=params.license,
        dry_run=params.dry_run,
    )
    report = push_checkpoint(params.folder, params.repo_id, options)
    if params.as_json:
        print_json(report)
    else:
        terminal.write(document(report))
