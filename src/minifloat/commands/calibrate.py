"""The command `calibrate`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from minifloat.commands.options import (
    COUNT,
    FOLDER,
    MODEL,
    SIZE,
    device_option,
    json_option,
    pass_params,
    print_json,
    revision_option,
    verbose_option,
)


@dataclass(frozen=True)
class CalibrateParams:
    """The parameters of `calibrate`, named as its options."""

    model: str
    stats: Path
    revision: str | None
    sources: tuple[str, ...]
    samples: int
    seq_len: int
    seed: int
    no_packing: bool
    held_out: float
    histogram: bool
    per_channel: bool
    hessians: bool
    until_stable: float | None
    max_memory: int | None
    from_quantized: bool
    device: str
    rule: str
    overwrite: bool
    verbose: bool
    as_json: bool


@click.command()
@click.argument("model", type=MODEL)
@click.argument("stats", type=FOLDER)
@revision_option()
@click.option("--data", "sources", multiple=True, required=True, metavar="DATA", help="Calibration set; repeatable.")
@click.option("--samples", default=512, show_default=True, type=COUNT, help="Sequences in all.")
@click.option("--seq-len", default=512, show_default=True, type=click.IntRange(min=2), help="Tokens per sequence.")
@click.option("--seed", default=0, show_default=True, type=int, help="For the choice of documents, and of self.")
@click.option("--no-packing", is_flag=True, help="One document per sequence; nothing is ever padded.")
@click.option("--held-out", default=0.1, show_default=True, type=float, help="Fraction of text to test the scales on.")
@click.option("--histogram", is_flag=True, help="Count magnitudes: needed by the rules percentile and mse.")
@click.option("--per-channel", is_flag=True, help="Record the amax of each input channel.")
@click.option("--hessians", is_flag=True, help="Store Hessians too, for `quantize --method gptq --stats STATS`.")
@click.option("--until-stable", type=float, metavar="TOLERANCE", help="Stop when no scale moves by more, e.g. 0.01.")
@click.option("--max-memory", type=SIZE, metavar="SIZE", help="Weights to hold at a time, e.g. 8GiB.  [default: all]")
@click.option("--from-quantized", is_flag=True, help="MODEL is quantized itself: run its dequantized weights.")
@device_option()
@click.option("--rule", default="max", show_default=True, help="For the table that is printed; STATS suits every rule.")
@click.option("--overwrite", is_flag=True, help="Replace STATS if it exists.")
@verbose_option("module")
@json_option()
@pass_params(CalibrateParams)
def calibrate(params: CalibrateParams) -> None:
    """Run text through the BF16 checkpoint MODEL and record amax into the file STATS (*.safetensors).

    DATA is a .txt, .jsonl, .csv or .parquet file, a folder of them, or the name of a data set of the hub, with options
    after a #: gsm8k.jsonl#column=question,weight=2

    DATA self is text that the model itself writes; it is kept beside STATS, as *.self.safetensors.

    With --hessians, the folder *.hessians beside STATS serves GPTQ in every scheme without text. It takes half
    the square of the width of each input in float32, and samples of inputs: 3 GB for a Llama of 1.1 billion parameters.
    """
    from minifloat.calibration.options import CalibrateOptions
    from minifloat.calibration.result import held_out_path, require_free
    from minifloat.calibration.rules import parse_rule
    from minifloat.calibration.session import calibrate as run_calibration
    from minifloat.calibration.session import own_text_path
    from minifloat.calibration.summary import summarize
    from minifloat.commands.display.stats import print_stats
    from minifloat.commands.progress import progress_bar
    from minifloat.quantize.own_text import prepare_own_text
    from minifloat.quantize.rounding.collect import save_hessians
    from minifloat.quantize.rounding.saved import hessians_path

    rule, stats = parse_rule(params.rule), params.stats
    require_free([stats, held_out_path(stats)], overwrite=params.overwrite)
    options = CalibrateOptions(
        samples=params.samples,
        seq_len=params.seq_len,
        seed=params.seed,
        packing=not params.no_packing,
        held_out=params.held_out,
        histogram=params.histogram,
        per_channel=params.per_channel,
        until_stable=params.until_stable,
        max_memory=params.max_memory,
        work_dir=stats.with_name(f"{stats.name}.minifloat-work"),
        device=params.device,
        rule=rule,
        own_text_file=own_text_path(stats),
        from_quantized=params.from_quantized,
        revision=params.revision,
    )

    with progress_bar(enabled=not params.as_json) as progress:
        if params.hessians:
            save_hessians(
                params.model,
                params.sources,
                hessians_path(stats),
                options,
                overwrite=params.overwrite,
                progress=progress,
            )
        else:
            prepare_own_text(params.model, params.sources, options, progress)
        collected = run_calibration(params.model, params.sources, options, progress=progress)
    files = collected.save(stats, overwrite=params.overwrite)
    if params.hessians:
        files = (*files, hessians_path(stats))
    if params.as_json:
        summary = summarize(collected.stats, rule, collected.held_out).to_dict()
        print_json({**collected.to_dict(), "files": list(map(str, files)), **summary})
        return
    print_stats(collected.stats, rule, collected.held_out, verbose=params.verbose)
    click.echo(f"Written to {', '.join(map(str, files))}")
