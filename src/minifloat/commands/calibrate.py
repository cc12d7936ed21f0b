"""The command `calibrate`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from minifloat.calibration.options import CalibrateOptions
from minifloat.commands.options import (
    FOLDER,
    MODEL,
    device_option,
    json_option,
    print_json,
    revision_option,
    rule_option,
    verbose_option,
)
from minifloat.commands.options_from import build, options_from


@click.command()
@click.argument("model", type=MODEL)
@click.argument("stats", type=FOLDER)
@revision_option()
@click.option(
    "--data", "sources", multiple=True, required=True, metavar="DATA", help="Text to run, as above; repeatable."
)
@options_from(
    CalibrateOptions,
    without=("work_dir", "device", "dtype", "rule", "max_saturation", "own_text_file", "revision"),
    until_stable={"metavar": "TOLERANCE"},
)
@device_option()
@rule_option("Rule of the table that is printed, where STATS suits every rule")
@click.option("--overwrite", is_flag=True, help="Replace STATS if it exists.")
@verbose_option("module")
@json_option()
def calibrate(
    model: str,
    stats: Path,
    sources: tuple[str, ...],
    rule: str,
    overwrite: bool,
    verbose: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Run text through the BF16 checkpoint MODEL and record amax into the file STATS (*.safetensors).

    DATA is a .txt, .jsonl, .csv or .parquet file, a folder of them, or the name of a data set of the hub, with options
    after a #: gsm8k.jsonl#column=question,weight=2

    DATA self is text that the model itself writes; it is kept beside STATS, in MODEL.self-text-512.safetensors,
    where 512 is --seq-len.
    """
    from minifloat.calibration.calibrate import calibrate as run_calibration
    from minifloat.calibration.document import document
    from minifloat.calibration.own_text import own_text_path
    from minifloat.calibration.result import held_out_path, require_free
    from minifloat.calibration.rules import parse_rule
    from minifloat.calibration.summary import summarize
    from minifloat.commands.progress import progress_bar
    from minifloat.quantize.own_text import prepare_own_text
    from minifloat.report import terminal

    parsed = parse_rule(rule)
    require_free([stats, held_out_path(stats)], overwrite=overwrite)
    options = build(
        CalibrateOptions,
        values,
        work_dir=stats.with_name(f"{stats.name}.minifloat-work"),
        rule=parsed,
        own_text_file=own_text_path(model, stats, values["seq_len"]),
    )

    with progress_bar(enabled=not as_json) as progress:
        prepare_own_text(model, sources, options, progress)
        collected = run_calibration(model, sources, options, progress=progress)
    files = collected.save(stats, overwrite=overwrite)
    if as_json:
        summary = summarize(collected.stats, parsed, collected.held_out).to_dict()
        print_json({**collected.to_dict(), "files": list(map(str, files)), **summary})
        return
    terminal.write(document(collected.stats, parsed, collected.held_out, verbose=verbose))
    click.echo(f"Written to {', '.join(map(str, files))}")
