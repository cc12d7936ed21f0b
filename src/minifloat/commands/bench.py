"""The command `bench`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from minifloat.commands.options import MODEL, revision_option
from minifloat.errors import UsageError
from minifloat.numerics.scheme import DEFAULT_SCHEME

_FOLDER = click.Path(path_type=Path)


@click.command()
@click.argument("out", type=MODEL, required=False)
@click.option("--baseline", type=MODEL, help="The checkpoint that OUT was made from: a folder or a model of the hub.")
@revision_option("the baseline")
@click.option("--shape", metavar="NAME", help="Instead of OUT: random weights of this shape, see below.")
@click.option("--scheme", default=DEFAULT_SCHEME, show_default=True, help="With --shape: what to quantize to.")
@click.option("--models-dir", type=_FOLDER, help="With --shape: keep the models here, and reuse them.")
@click.option("--input-len", default=256, show_default=True, type=click.IntRange(min=1), help="Tokens of a prompt.")
@click.option("--output-len", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens of an output.")
@click.option("--batch-sizes", default="1,4,16", show_default=True, metavar="N,N", help="Prompts at a time.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Both take turns so often.")
@click.option("--device", default="cpu", show_default=True, help="Where both run: cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: all]")
@click.option("--lm-head", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True, help="Of OUT.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, help="Of OUT: auto, bfloat16, float32 or fp8.")
@click.option("--seed", default=0, show_default=True, type=int, help="Of the prompts.")
@click.option("--update-card", is_flag=True, help="Put the numbers into the README.md of OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--save-result", is_flag=True, help="Write the JSON into a file.")
@click.option("--result-dir", type=_FOLDER, default=Path(), help="For --save-result.  [default: .]")
def bench(
    out: str | None,
    baseline: str | None,
    revision: str | None,
    shape: str | None,
    scheme: str,
    models_dir: Path | None,
    input_len: int,
    output_len: int,
    batch_sizes: str,
    rounds: int,
    device: str,
    threads: int | None,
    lm_head: str,
    kv_cache_dtype: str,
    seed: int,
    update_card: bool,
    as_json: bool,
    save_result: bool,
    result_dir: Path,
) -> None:
    """Measure what the quantized checkpoint OUT gains over its BASELINE: memory, load time, latency, throughput.

    Both run on minifloat's engine, the same prompts in turn. Without a model at hand, --shape makes one: llama-1b,
    qwen3-0.6b, llama-8b or tinyllama-1.1b, with random weights, in BF16 and in --scheme.
    """
    from minifloat.bench import bench as measure
    from minifloat.bench.shapes import model_pair
    from minifloat.bench.workload import Workload
    from minifloat.commands.display.bench import print_gains
    from minifloat.commands.display.console import progress_bar

    if (shape is None) == (out is None) or (out is None) != (baseline is None):
        raise UsageError("give OUT and --baseline MODEL, or --shape NAME and neither of them")
    if update_card:
        from minifloat.checkpoint.files import resolve_folder

        if out is None:
            raise UsageError("--update-card is for OUT; a model of random weights needs no card")
        resolve_folder(out)  # a model of the hub has its card there
    if not all(part.strip().isdecimal() for part in batch_sizes.split(",")):
        raise UsageError(f"--batch-sizes: expected numbers with commas between, got {batch_sizes!r}")
    workload = Workload(input_len, output_len, tuple(map(int, batch_sizes.split(","))), rounds, seed)
    with (
        model_pair(out, baseline, shape, scheme, models_dir) as (before, after),
        progress_bar(enabled=not as_json) as progress,
    ):
        report = measure(
            after,
            before,
            workload=workload,
            device=device,
            threads=threads,
            lm_head=lm_head,
            kv_cache_dtype=kv_cache_dtype,
            progress=progress,
            revision=revision,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_gains(report)
    if update_card and out is not None:
        from minifloat.bench.card import gains_section
        from minifloat.report.card import update_card as put

        click.echo(f"Card: {put(out, gains_section(report))}", err=as_json)
    if save_result:
        click.echo(f"Written to {report.save(result_dir)}", err=as_json)
