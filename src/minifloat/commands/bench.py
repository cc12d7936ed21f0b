"""The command `bench`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minifloat.commands.options import (
    COUNT,
    FOLDER,
    MODEL,
    SpeculationParams,
    complete_scheme,
    device_option,
    engine_activations_option,
    json_option,
    lm_head_option,
    pass_params,
    print_json,
    revision_option,
    speculation_options,
    threads_option,
)
from minifloat.commands.report import add_to_report, no_report_option
from minifloat.errors import UsageError
from minifloat.numerics.scheme import DEFAULT_SCHEME

if TYPE_CHECKING:
    from minifloat.evaluate.bench.workload import Workload


@dataclass(frozen=True)
class BenchParams(SpeculationParams):
    """The parameters of `bench`, named as its options."""

    out: str | None
    baseline: str | None
    revision: str | None
    shape: str | None
    scheme: str
    models_dir: Path | None
    input_len: int
    output_len: int
    batch_sizes: str
    rounds: int
    device: str
    threads: int | None
    lm_head: str
    activations: str
    kv_cache_dtype: str
    seed: int
    report: Path | None
    no_report: bool
    update_card: bool
    as_json: bool
    save_result: bool
    result_dir: Path


@click.command()
@click.argument("out", type=MODEL, required=False)
@click.option("--baseline", type=MODEL, help="The checkpoint that OUT was made from: a folder or a model of the hub.")
@revision_option("the baseline")
@click.option("--shape", metavar="NAME", help="Instead of OUT: random weights of this shape, see below.")
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    default=DEFAULT_SCHEME,
    show_default=True,
    help="With --shape: what to quantize to.",
)
@click.option("--models-dir", type=FOLDER, help="With --shape: keep the models here, and reuse them.")
@click.option("--input-len", default=256, show_default=True, type=COUNT, help="Tokens per prompt.")
@click.option("--output-len", default=128, show_default=True, type=click.IntRange(min=2), help="Tokens per output.")
@click.option("--batch-sizes", default="1,4,16", show_default=True, metavar="N,N", help="Prompts at a time.")
@click.option("--rounds", default=3, show_default=True, type=COUNT, help="Times that both models are measured in turn.")
@device_option("Where both run: cpu, cuda or cuda:N.")
@threads_option("all")
@lm_head_option("OUT")
@engine_activations_option("OUT")
@click.option(
    "--kv-cache-dtype", default="auto", show_default=True, help="KV cache of OUT: auto, bfloat16, float32 or fp8."
)
@speculation_options
@click.option("--seed", default=0, show_default=True, type=int, help="For the prompts.")
@click.option("--report", type=FOLDER, help="Write a report as one HTML file.")
@no_report_option()
@click.option("--update-card", is_flag=True, help="Write the numbers into the README.md of OUT.")
@json_option()
@click.option("--save-result", is_flag=True, help="Write the JSON into a file.")
@click.option("--result-dir", type=FOLDER, default=Path(), help="Folder for --save-result.  [default: .]")
@pass_params(BenchParams)
def bench(params: BenchParams) -> None:
    """Measure what the quantized checkpoint OUT gains over its BASELINE: memory, load time, latency, throughput.

    Both run on minifloat's engine with the same prompts, in turn. If you have no model at hand, --shape makes one:
    llama-1b, qwen3-0.6b, llama-8b or tinyllama-1.1b, with random weights, in BF16 and in --scheme.
    """
    from minifloat.commands.display.bench import print_gains
    from minifloat.commands.progress import progress_bar
    from minifloat.evaluate.bench import BenchOptions, bench_checkpoint
    from minifloat.evaluate.bench.shapes import model_pair

    _require_usable(params)
    out = params.out
    workload = _workload(params)
    with (
        model_pair(out, params.baseline, params.shape, params.scheme, params.models_dir) as (baseline, candidate),
        progress_bar(enabled=not params.as_json) as progress,
    ):
        options = BenchOptions(
            device=params.device,
            threads=params.threads,
            lm_head=params.lm_head,
            activations=params.activations,
            kv_cache_dtype=params.kv_cache_dtype,
            speculate=params.speculate,
            draft=params.draft,
            draft_tokens=params.draft_tokens,
            revision=params.revision,
        )
        report = bench_checkpoint(candidate, baseline, workload, options, progress=progress)
    if params.as_json:
        print_json(report)
    else:
        print_gains(report)
    if params.report is not None:
        from minifloat.checkpoint.files import written_whole
        from minifloat.evaluate.bench.page import bench_page

        with written_whole(params.report) as file:
            file.write(bench_page(report).encode())
        click.echo(f"Report: {params.report}", err=params.as_json)
    if out is not None and not params.no_report:
        add_to_report(out, report, err=params.as_json)
    if params.update_card and out is not None:
        from minifloat.evaluate.bench.card_section import gains_section
        from minifloat.report.card import update_card

        click.echo(f"Card: {update_card(out, gains_section(report))}", err=params.as_json)
    if params.save_result:
        click.echo(f"Written to {report.save(params.result_dir)}", err=params.as_json)


def _require_usable(params: BenchParams) -> None:
    """Refuse contradictory options before a model is loaded."""
    out = params.out
    if (params.shape is None) == (out is None) or (out is None) != (params.baseline is None):
        raise UsageError("give OUT and --baseline MODEL, or --shape NAME and neither of them")
    if params.report is not None and (params.report.is_dir() or not params.report.parent.is_dir()):
        raise UsageError(f"--report {params.report}: not a file in a folder that exists")
    if params.update_card:
        from minifloat.checkpoint.files import resolve_folder

        if out is None:
            raise UsageError("--update-card is for OUT; a model of random weights needs no card")
        resolve_folder(out)  # raises for a model of the hub, whose card is not a local file


def _workload(params: BenchParams) -> Workload:
    from minifloat.evaluate.bench.workload import Workload

    sizes = params.batch_sizes.split(",")
    if not all(size.strip().isdecimal() for size in sizes):
        raise UsageError(f"--batch-sizes: expected numbers with commas between, got {params.batch_sizes!r}")
    return Workload(params.input_len, params.output_len, tuple(map(int, sizes)), params.rounds, params.seed)
