"""The command `report`, and what the commands that add to a report share. Nothing heavy is imported before it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from minifloat.commands.options import FOLDER
from minifloat.errors import MinifloatError

if TYPE_CHECKING:
    from minifloat.evaluate.bench import GainsReport
    from minifloat.evaluate.compare import Comparison

_Command = TypeVar("_Command", bound=Callable[..., Any])


def no_report_option() -> Callable[[_Command], _Command]:
    """Return the option that leaves the report beside a checkpoint alone."""
    return click.option("--no-report", is_flag=True, help="Leave the report.html beside the checkpoint alone.")


@click.command()
@click.argument("out", type=FOLDER)
def report(out: Path) -> None:
    """Show what is known of the checkpoint OUT: what was done, is it the same model, what was gained, where it loads.

    The results are those that `quantize`, `compare` and `bench` left beside the checkpoint. Its report.html is drawn
    again.
    """
    from minifloat.commands.display.report import print_results
    from minifloat.evaluate.checkpoint_report import draw_results, read_results

    results = read_results(out)
    path = draw_results(results)
    print_results(results)
    click.echo(f"Report: {path}")


def add_to_report(folder: str | Path, result: GainsReport | Comparison, *, err: bool) -> None:
    """Add a result to the report beside a checkpoint, if it has one, and say so."""
    from minifloat.evaluate.checkpoint_report import has_report

    if has_report(folder):
        draw_report(folder, result, err=err)


def draw_report(
    folder: str | Path, result: GainsReport | Comparison | None = None, *, err: bool = False, quiet: bool = False
) -> None:
    """Draw the report beside a checkpoint, and say so.

    A folder that cannot be written to, or a damaged report.json, is no reason to fail: the results were printed.
    """
    from minifloat.evaluate.checkpoint_report import write_report

    try:
        path = write_report(folder, result)
        if not quiet:
            click.echo(f"Report: {path}", err=err)
    except MinifloatError as error:
        click.echo(f"The report beside {folder} was not written: {error}", err=True)
