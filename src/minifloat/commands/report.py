"""The command `report`, and what the commands that add to a report share. Nothing heavy is imported before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from minifloat.commands.options import FOLDER
from minifloat.errors import MinifloatError, UsageError

if TYPE_CHECKING:
    from minifloat.evaluate.bench.figures import GainsReport
    from minifloat.evaluate.compare.result import Comparison
    from minifloat.report.document import Document

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
    from minifloat.evaluate.checkpoint_report import document, draw_results, read_results
    from minifloat.report import terminal

    results = read_results(out)
    path = draw_results(results)
    terminal.write(document(results))
    click.echo(f"Report: {path}")


def add_to_report(folder: str | Path, result: GainsReport | Comparison, *, err: bool) -> None:
    """Add a result to the report beside a checkpoint, if it has one, and say so."""
    from minifloat.evaluate.checkpoint_report import has_report

    if has_report(folder):
        draw_report(folder, result, err=err)


def draw_report(
    folder: str | Path, result: GainsReport | Comparison | None = None, *, err: bool = False, quiet: bool = False
) -> None:
    """Draw the report beside a checkpoint, and say so; failing to is no error, because the results were printed."""
    from minifloat.evaluate.checkpoint_report import write_report

    try:
        path = write_report(folder, result)
        if not quiet:
            click.echo(f"Report: {path}", err=err)
    except MinifloatError as error:
        click.echo(f"The report beside {folder} was not written: {error}", err=True)


def require_writable(path: Path | None, option: str) -> None:
    """Refuse a file that cannot be written, before anything slow happens."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"{option} {path}: not a file in a folder that exists")


def require_folders(models: Iterable[str]) -> None:
    """Refuse models of the hub, whose cards are no local files."""
    from minifloat.checkpoint.files import resolve_folder

    for model in models:
        resolve_folder(model)


def write_page(path: Path, document: Document, *, err: bool, what: str = "Report: ") -> None:
    """Write a document as an HTML file, and say so."""
    from minifloat.checkpoint.files import written_whole
    from minifloat.report import html

    with written_whole(path) as file:
        file.write(html.write(document).encode())
    click.echo(f"{what}{path}", err=err)
