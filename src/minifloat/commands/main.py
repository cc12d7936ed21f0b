"""The command line: each command parses its options, calls one public function and prints what it returns.

Nothing heavy is imported here; a command imports what it needs when it runs, so `--help` answers at once. A user's
mistake is one line on standard error and exit status 2 (`--debug` shows the traceback); Ctrl-C is 130.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from minifloat._version import __version__
from minifloat.commands.bench import bench
from minifloat.commands.check import check
from minifloat.commands.compare import compare
from minifloat.commands.convert import convert
from minifloat.commands.options import MODEL, revision_option
from minifloat.commands.plan import plan
from minifloat.commands.push import push
from minifloat.commands.serving import chat, parse_size, serve
from minifloat.errors import MinifloatError, UsageError
from minifloat.kernels.processors import bound_spin
from minifloat.numerics.scheme import DEFAULT_SCHEME, SCHEMES


class _Commands(click.Group):
    """A group that turns our errors into one line, and lists commands in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MinifloatError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"minifloat: error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("\nminifloat: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="minifloat")
def main(debug: bool) -> None:
    """Quantize language models to FP8 and FP4, and prove that they are still the same models."""
    bound_spin()  # before a command imports torch


def _scheme_help() -> str:
    return "\n".join(["\b", "Schemes:"] + [f"  {scheme.name:<12} {scheme.summary}" for scheme in SCHEMES.values()])


@main.command(epilog=_scheme_help())
@click.argument("model", type=MODEL)
@click.argument("out", type=click.Path(path_type=Path))
@revision_option()
@click.option("--scheme", default=DEFAULT_SCHEME, show_default=True, metavar="NAME", help="What to quantize to.")
@click.option(
    "--layout", default="compressed-tensors", show_default=True, help="compressed-tensors, or fp8 (DeepSeek)."
)
@click.option("--override", multiple=True, metavar="REGEX=SCHEME|bf16", help="For modules that match; the last wins.")
@click.option(
    "--exclude", multiple=True, metavar="REGEX", help="Keep these modules: short for --override 'REGEX=bf16'."
)
@click.option("--stats", "stats_path", type=click.Path(path_type=Path), help="Activation statistics by `calibrate`.")
@click.option("--calibration", "sources", multiple=True, metavar="DATA", help="Calibrate now on this text; repeatable.")
@click.option("--calibration-samples", default=512, show_default=True, type=click.IntRange(min=1), help="Sequences.")
@click.option("--calibration-seq-len", default=512, show_default=True, type=click.IntRange(min=2), help="Their tokens.")
@click.option("--rule", default="max", show_default=True, help="How statistics become static scales.")
@click.option("--max-saturation", type=click.FloatRange(0, 1), help="Largest fraction of held-out inputs to saturate.")
@click.option("--kv-cache", type=click.Choice(["fp8"]), help="Write calibrated scales of an FP8 KV cache.")
@click.option("--target", metavar="ENGINE:HARDWARE[:tpN]", help="Refuse what will not load there, e.g. vllm:h100:tp4.")
@click.option("--base-model", metavar="ID", help="For the model card: MODEL's id on the hub, where it is a folder.")
@click.option(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="Where to cast: cpu, cuda or cuda:N."
)
@click.option("--workers", type=click.IntRange(min=1), help="Threads.  [default: one per core, at most 8]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists, at the very end.")
@click.option("--verbose", "-v", is_flag=True, help="Print every tensor instead of a summary by layer.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def quantize(
    model: str,
    out: Path,
    revision: str | None,
    scheme: str,
    layout: str,
    override: tuple[str, ...],
    exclude: tuple[str, ...],
    stats_path: Path | None,
    sources: tuple[str, ...],
    calibration_samples: int,
    calibration_seq_len: int,
    rule: str,
    max_saturation: float | None,
    kv_cache: str | None,
    target: str | None,
    base_model: str | None,
    device: str,
    workers: int | None,
    overwrite: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Quantize the checkpoint MODEL, a folder or a model of the hub, into the new folder OUT.

    Weights are streamed: memory stays small whatever the size of the model. A run that is interrupted, even killed,
    leaves no half checkpoint behind: the same command continues it.
    """
    from minifloat.commands.display.console import print_quantize_report, progress_bar
    from minifloat.plan.quantization import KEEP
    from minifloat.quantize.job import quantize_checkpoint

    with progress_bar(enabled=not (quiet or as_json)) as progress:
        report = quantize_checkpoint(
            model,
            out,
            scheme,
            layout=layout,
            overrides=[*override, *(f"{pattern}={KEEP}" for pattern in exclude)],
            workers=workers,
            overwrite=overwrite,
            calibration=_calibration(
                model,
                stats_path,
                sources,
                rule,
                max_saturation,
                {
                    "samples": calibration_samples,
                    "seq_len": calibration_seq_len,
                    "progress": progress,
                    "revision": revision,
                },
            ),
            kv_cache=kv_cache is not None,
            target=target,
            device=device,
            progress=progress,
            revision=revision,
            base_model=base_model,
        )
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    elif not quiet:
        print_quantize_report(report, verbose=verbose)


def _calibration(
    model: str,
    stats_path: Path | None,
    sources: tuple[str, ...],
    rule: str,
    max_saturation: float | None,
    options: dict[str, Any],
) -> Any:
    """What the options of `quantize` say about activations: a `Calibration`, or None."""
    if stats_path is None and not sources:
        if max_saturation is not None:
            raise UsageError("--max-saturation needs --stats or --calibration")
        return None
    if stats_path is not None and sources:
        raise UsageError("--stats and --calibration are two ways to the same thing; give one")
    from minifloat.calibration.rules import HistogramRule, parse_rule
    from minifloat.quantize.calibrated import Calibration

    parsed = parse_rule(rule)
    if stats_path is not None:
        from minifloat.calibration.session import Collected

        collected = Collected.load(stats_path)
    else:
        from minifloat.calibration.session import collect

        collected = collect(model, sources, histogram=isinstance(parsed, HistogramRule), **options)
    return Calibration(collected.stats, parsed, collected.held_out, max_saturation)


@main.command()
@click.argument("model", type=MODEL)
@click.argument("stats", type=click.Path(path_type=Path))
@revision_option()
@click.option("--data", "sources", multiple=True, required=True, metavar="DATA", help="Text; repeatable. See below.")
@click.option("--samples", default=512, show_default=True, type=click.IntRange(min=1), help="Sequences in all.")
@click.option("--seq-len", default=512, show_default=True, type=click.IntRange(min=2), help="Tokens of a sequence.")
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--no-packing", is_flag=True, help="One document per sequence; nothing is ever padded.")
@click.option("--held-out", default=0.1, show_default=True, type=float, help="Fraction that scales are tried on.")
@click.option("--histogram", is_flag=True, help="Count magnitudes: needed by the rules percentile and mse.")
@click.option("--per-channel", is_flag=True, help="Record the amax of each input channel.")
@click.option("--until-stable", type=float, metavar="TOLERANCE", help="Stop when no scale moves by more, e.g. 0.01.")
@click.option("--max-memory", metavar="SIZE", help="Weights to hold at a time, e.g. 8GiB.  [default: all]")
@click.option("--device", default="cpu", show_default=True)
@click.option("--rule", default="max", show_default=True, help="For the table that is printed; the file serves all.")
@click.option("--overwrite", is_flag=True, help="Replace STATS if it exists.")
@click.option("--verbose", "-v", is_flag=True, help="Print every module instead of a summary by layer.")
def calibrate(
    model: str,
    stats: Path,
    revision: str | None,
    sources: tuple[str, ...],
    samples: int,
    seq_len: int,
    seed: int,
    no_packing: bool,
    held_out: float,
    histogram: bool,
    per_channel: bool,
    until_stable: float | None,
    max_memory: str | None,
    device: str,
    rule: str,
    overwrite: bool,
    verbose: bool,
) -> None:
    """Run text through the BF16 checkpoint MODEL and record amax into the file STATS (*.safetensors).

    DATA is a .txt, .jsonl, .csv or .parquet file, a folder of them, or the name of a data set of the hub, with options
    after a #: gsm8k.jsonl#column=question,weight=2
    """
    from minifloat.calibration.rules import parse_rule
    from minifloat.calibration.session import collect, held_out_path, require_free
    from minifloat.commands.display.console import progress_bar
    from minifloat.commands.display.stats import print_stats

    parsed = parse_rule(rule)
    require_free([stats, held_out_path(stats)], overwrite=overwrite)
    with progress_bar(enabled=True) as progress:
        collected = collect(
            model,
            sources,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            packing=not no_packing,
            held_out=held_out,
            histogram=histogram,
            per_channel=per_channel,
            until_stable=until_stable,
            max_memory=None if max_memory is None else parse_size(max_memory),
            work_dir=stats.with_name(f"{stats.name}.minifloat-work"),
            device=device,
            progress=progress,
            revision=revision,
        )
    files = collected.save(stats, overwrite=overwrite)
    print_stats(collected.stats, parsed, collected.held_out, verbose=verbose)
    click.echo(f"Written to {', '.join(map(str, files))}")


@main.command()
@click.argument("model", type=MODEL)
@revision_option()
@click.option("--verbose", "-v", is_flag=True, help="Print every tensor instead of a summary by layer.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--rule", default="max", show_default=True, help="For activation statistics: statistics to scales.")
@click.option("--plot", type=click.Path(path_type=Path), help="For activation statistics: draw them into an HTML file.")
def inspect(model: str, revision: str | None, verbose: bool, as_json: bool, rule: str, plot: Path | None) -> None:
    """Show what the checkpoint MODEL holds: schemes, bytes, bits per weight. Reads headers only, on the hub too.

    MODEL may also be a file of activation statistics that `calibrate` wrote.
    """
    if Path(model).is_file():
        _inspect_stats(Path(model), rule, plot, verbose=verbose)
        return
    if plot is not None:
        raise UsageError("--plot draws activation statistics; MODEL is a folder")
    from minifloat.commands.display.console import print_inspection
    from minifloat.layouts.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(model, revision=revision)
    if as_json:
        click.echo(json.dumps(inspection.to_dict(), indent=2))
    else:
        print_inspection(inspection, verbose=verbose)


def _inspect_stats(path: Path, rule: str, plot: Path | None, *, verbose: bool) -> None:
    from minifloat.calibration.rules import parse_rule
    from minifloat.calibration.session import Collected, require_free
    from minifloat.commands.display.stats import print_stats

    collected, parsed = Collected.load(path), parse_rule(rule)
    print_stats(collected.stats, parsed, collected.held_out, verbose=verbose)
    if plot is not None:
        from minifloat.calibration.page import stats_page

        require_free([plot], overwrite=True)
        plot.write_text(stats_page(collected.stats, parsed, collected.held_out), encoding="utf-8")
        click.echo(f"Drawn to {plot}")


main.add_command(plan)
main.add_command(convert)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        from minifloat.kernels.threads import set_threads

        set_threads(threads)


main.add_command(check)
main.add_command(compare)


@main.command()
@click.argument("model", type=MODEL)
@click.argument("prompt")
@revision_option()
@click.option("--max-new-tokens", "-n", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy.")
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1, min_open=True))
@click.option("--seed", type=int, help="For sampling.")
@click.option("--weight-only", is_flag=True, help="Do not quantize inputs, whatever the checkpoint says.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: torch's]")
def generate(
    model: str,
    prompt: str,
    revision: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    weight_only: bool,
    device: str,
    threads: int | None,
) -> None:
    """Continue PROMPT with the checkpoint MODEL, quantized or not, streaming the text."""
    _set_threads(threads)
    from minifloat.runtime.devices import device_named
    from minifloat.runtime.load import load
    from minifloat.serve.text import generate as stream

    loaded = load(model, device=device_named(device), weight_only=weight_only, revision=revision)
    click.echo(prompt, nl=False)
    for piece in stream(loaded, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed):
        click.echo(piece, nl=False)
    click.echo()


main.add_command(serve)
main.add_command(bench)
main.add_command(chat)
main.add_command(push)


@main.command()
def doctor() -> None:
    """Show what this installation has: versions, the native kernels, and what is slower without them."""
    from minifloat.commands.display.console import print_diagnosis
    from minifloat.runtime.diagnosis import diagnose

    print_diagnosis(diagnose())
