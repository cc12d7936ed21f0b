"""The command `push`. Nothing heavy is imported before it runs, and no torch at all."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("folder", type=click.Path())
@click.argument("repo_id", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make a new repository private; an existing one must be.")
@click.option("--revision", metavar="BRANCH", help="Commit to this branch.  [default: main]")
@click.option("--message", metavar="TEXT", help="Of the commit.")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead.")
@click.option("--base-model", metavar="ID", help="What it was made from, if its card does not say.")
@click.option("--license", metavar="NAME", help="Its licence, if its card does not say: apache-2.0, mit, other, ...")
@click.option("--dry-run", is_flag=True, help="List what would be uploaded; write and send nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def push(
    folder: str,
    repo_id: str,
    private: bool,
    revision: str | None,
    message: str | None,
    create_pr: bool,
    base_model: str | None,
    license: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upload the checkpoint FOLDER to the hub, as ORG/NAME.

    Weights, config, tokenizer, card, licence and the report of `quantize` go; whatever else is in FOLDER stays. The
    token is that of HF_TOKEN or of `hf auth login`.
    """
    from huggingface_hub.utils import disable_progress_bars

    from minifloat.commands.display.console import print_push
    from minifloat.publish.push import push_checkpoint

    if as_json or not sys.stderr.isatty():
        disable_progress_bars()
    report = push_checkpoint(
        folder,
        repo_id,
        private=private,
        revision=revision,
        message=message,
        create_pr=create_pr,
        base_model=base_model,
        license=license,
        dry_run=dry_run,
    )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_push(report)
