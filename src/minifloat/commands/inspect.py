"""The command `inspect`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from minifloat.commands.options import (
    FOLDER,
    MODEL,
    json_option,
    print_json,
    revision_option,
    rule_option,
    show,
    verbose_option,
)
from minifloat.commands.report import require_writable, write_page


@click.command()
@click.argument("model", type=MODEL)
@revision_option()
@verbose_option()
@json_option()
@rule_option("How activation statistics become static scales")
@click.option("--plot", type=FOLDER, help="Draw an HTML file; of a checkpoint it reads a sample of the weights.")
def inspect(model: str, revision: str | None, verbose: bool, as_json: bool, rule: str, plot: Path | None) -> None:
    """Show what the checkpoint MODEL holds: schemes, bytes, bits per weight. Reads headers only, on the hub too.

    --plot draws the magnitudes of the weights and of their scales, for which a sample of each weight is read. MODEL
    may also be a file of activation statistics that `calibrate` wrote.
    """
    from minifloat.checkpoint.layout import is_gguf

    if Path(model).is_file() and not is_gguf(model):
        _inspect_stats(Path(model), rule, plot, verbose=verbose, as_json=as_json)
        return
    from minifloat.model.layouts.document import document
    from minifloat.model.layouts.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    show(inspection, partial(document, verbose=verbose), as_json=as_json)
    if plot is not None:
        from minifloat.model.layouts.document import inspected_document

        require_writable(plot, "--plot")
        write_page(plot, inspected_document(model, revision=revision), err=as_json, what="Drawn to ")


def _inspect_stats(path: Path, rule_text: str, plot: Path | None, *, verbose: bool, as_json: bool) -> None:
    from minifloat.calibration.document import document
    from minifloat.calibration.result import Calibration, require_free
    from minifloat.calibration.rules import parse_rule
    from minifloat.calibration.summary import summarize
    from minifloat.report import terminal

    rule = parse_rule(rule_text)
    collected = Calibration.load(path, rule)
    if as_json:
        print_json({**collected.to_dict(), **summarize(collected.stats, rule, collected.held_out).to_dict()})
    else:
        terminal.write(document(collected.stats, rule, collected.held_out, verbose=verbose))
    if plot is not None:
        from minifloat.report import html

        require_free([plot], overwrite=True)
        plot.write_text(html.write(document(collected.stats, rule, collected.held_out)), encoding="utf-8")
        click.echo(f"Drawn to {plot}", err=as_json)
