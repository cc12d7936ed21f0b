"""The command `bench`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from minifloat.commands.options import (
    FOLDER,
    MODEL,
    SPECULATE,
    complete_scheme,
    json_option,
    revision_option,
    show,
)
from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.commands.report import add_to_report, no_report_option, require_folders, require_writable, write_page
from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.evaluate.bench.workload import BenchOptions, Workload
from minifloat.kernels.processors import TeamOptions
from minifloat.numerics.scheme import DEFAULT_SCHEME


class _Sizes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """Numbers with commas between."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not all(size.strip().isdecimal() for size in value.split(",")):
            self.fail(f"expected numbers with commas between, got {value!r}", param, ctx)
        return tuple(map(int, value.split(",")))


@click.command(cls=GroupedCommand)
@click.argument("out", type=MODEL, required=False)
@click.option("--baseline", type=MODEL, help="The checkpoint that OUT was made from: a folder or a model of the hub.")
@revision_option("the baseline")
@click.option("--shape", metavar="NAME", help="Instead of OUT: random weights of one of the shapes above.")
@click.option(
    "--scheme",
    shell_complete=complete_scheme,
    default=DEFAULT_SCHEME,
    show_default=True,
    help="With --shape: what to quantize to.",
)
@click.option("--models-dir", type=FOLDER, help="With --shape: keep the models here, and reuse them.")
@options_from(
    Workload,
    batch_sizes={"type": _Sizes(), "multiple": False, "default": "1,4,16", "show_default": True, "metavar": "N,N"},
)
@options_from(TeamOptions)
@click.option("--report", type=FOLDER, help="Write a report as one HTML file.")
@no_report_option()
@click.option("--update-card", is_flag=True, help="Write the numbers into the README.md of OUT.")
@json_option()
@click.option("--save-result", is_flag=True, help="Write the JSON into a file.")
@click.option("--result-dir", type=FOLDER, default=Path(), help="Folder for --save-result.  [default: .]")
@options_from(EngineOptions, only=("device", "lm_head", "activations", "kv_cache_dtype"), group="Engine of OUT")
@options_from(
    EngineOptions,
    only=("speculate", "draft", "draft_tokens"),
    group="Engine of OUT",
    environment=True,
    speculate=SPECULATE,
)
def bench(
    out: str | None,
    baseline: str | None,
    shape: str | None,
    scheme: str,
    models_dir: Path | None,
    report: Path | None,
    no_report: bool,
    update_card: bool,
    as_json: bool,
    save_result: bool,
    result_dir: Path,
    **values: Any,
) -> None:
    """Measure what the quantized checkpoint OUT gains over its BASELINE: memory, load time, latency, throughput.

    Both run on minifloat's engine with the same prompts, in turn. If you have no model at hand, --shape makes one:
    llama-1b, qwen3-0.6b, llama-8b or tinyllama-1.1b, with random weights, in BF16 and in --scheme.
    """
    from minifloat.commands.progress import progress_bar
    from minifloat.evaluate.bench.document import document
    from minifloat.evaluate.bench.gains import bench_checkpoint
    from minifloat.evaluate.bench.shapes import model_pair

    if (shape is None) == (out is None) or (out is None) != (baseline is None):
        raise UsageError("give OUT and --baseline MODEL, or --shape NAME and neither of them")
    require_writable(report, "--report")
    if update_card:
        if out is None:
            raise UsageError("--update-card is for OUT; a model of random weights needs no card")
        require_folders([out])
    workload, options = build(Workload, values), build(BenchOptions, values, engine=build(EngineOptions, values))
    with (
        model_pair(out, baseline, shape, scheme, models_dir) as (original, candidate),
        progress_bar(enabled=not as_json) as progress,
    ):
        result = bench_checkpoint(candidate, original, workload, options, progress=progress)
    show(result, document, as_json=as_json)
    if report is not None:
        write_page(report, document(result), err=as_json)
    if out is not None and not no_report:
        add_to_report(out, result, err=as_json)
    if update_card and out is not None:
        from minifloat.report import markdown
        from minifloat.report.markdown import update_card as write_card

        section = markdown.write_section("bench", document(result))
        click.echo(f"Card: {write_card(out, section)}", err=as_json)
    if save_result:
        click.echo(f"Written to {result.save(result_dir)}", err=as_json)
