"""The command `compare`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minifloat.commands.options import MODEL, revision_option
from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.compare import Comparison

_FOLDER = click.Path(path_type=Path)
_INTERRUPTED = 130


def parse_fraction(text: str) -> float:
    """A number, or a percentage.

    Raises:
        ValueError: Neither.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    return float(number) / 100 if percent else float(number)


@click.command()
@click.argument("baseline", type=MODEL)
@click.argument("candidates", type=MODEL, nargs=-1, required=True)
@revision_option("BASELINE")
@click.option(
    "--data", multiple=True, metavar="DATA", help="Text, as for `calibrate`; repeatable.  [default: built in]"
)
@click.option("--window", type=click.IntRange(min=2), help="Tokens per window.  [default: 256]")
@click.option("--max-tokens", type=click.IntRange(min=2), help="Stop after this many tokens of each text.")
@click.option(
    "--max-ppl-increase",
    type=parse_fraction,
    metavar="FRACTION",
    default="1%",
    show_default=True,
    help="Verdict: of perplexity, per text.",
)
@click.option("--max-kl", type=float, default=0.02, show_default=True, help="Verdict: mean nats per token.")
@click.option(
    "--min-agreement",
    type=parse_fraction,
    metavar="FRACTION",
    default="97%",
    show_default=True,
    help="Verdict: same first choice.",
)
@click.option("--prompts", default=32, show_default=True, type=click.IntRange(min=0), help="To continue greedily.")
@click.option("--new-tokens", default=64, show_default=True, type=click.IntRange(min=1), help="Of a continuation.")
@click.option("--attribute", is_flag=True, help="Find out which modules do the damage, and what to keep in BF16.")
@click.option("--attribute-seconds", default=120.0, show_default=True, type=click.FloatRange(min=0, min_open=True))
@click.option("--tasks", metavar="NAME,NAME", help="Run tasks of lm-evaluation-harness (extra: eval).")
@click.option("--task-path", type=_FOLDER, help="A folder of task files.")
@click.option("--task-limit", type=click.IntRange(min=1), help="Items of each task.  [default: all]")
@click.option("--variants", is_flag=True, help="Also without FP8 inputs, and without an FP8 KV cache, where declared.")
@click.option("--weight-only", is_flag=True, help="Do not quantize inputs, whatever the checkpoint says.")
@click.option("--kv-cache", type=click.Choice(["auto", "none", "fp8"]), default="auto", show_default=True)
@click.option("--dtype", help="bfloat16, float16 or float32, for all.  [default: that of each config.json]")
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with.  [default: torch's]")
@click.option("--resume", type=_FOLDER, metavar="DIR", help="Keep scores in this folder; the same command goes on.")
@click.option("--report", type=click.Path(path_type=Path), help="Write a report as one HTML file.")
@click.option("--update-card", is_flag=True, help="Put the numbers into the README.md of each CANDIDATE.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(
    baseline: str,
    candidates: tuple[str, ...],
    data: tuple[str, ...],
    max_ppl_increase: float,
    max_kl: float,
    min_agreement: float,
    attribute: bool,
    attribute_seconds: float,
    tasks: str | None,
    threads: int | None,
    report: Path | None,
    update_card: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Is each of CANDIDATES still the same model as BASELINE? Run them over the same text and judge.

    Perplexity, KL divergence and agreement come with 95% intervals. Exit status: 0 if every candidate is within the
    tolerance, 1 if one is not, 3 if the text does not tell, 130 after Ctrl-C, which reports what is known by then.
    """
    if update_card:
        from minifloat.checkpoint.files import resolve_folder

        for candidate in candidates:
            resolve_folder(candidate)  # models of the hub have their cards there
    if threads is not None:
        from minifloat.kernels.threads import set_threads

        set_threads(threads)
    from minifloat.commands.display.compare import print_comparison
    from minifloat.commands.display.console import progress_bar
    from minifloat.compare import Tolerance, compare_models

    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise UsageError(f"--report {report}: not a file in a folder that exists")
    with progress_bar(enabled=not as_json) as progress:
        comparison = compare_models(
            baseline,
            candidates,
            data,
            progress=progress,
            tolerance=Tolerance(max_ppl_increase, max_kl, min_agreement),
            attribute=attribute_seconds if attribute else 0.0,
            tasks=tuple(filter(None, (tasks or "").split(","))),
            command=shlex.join(["minifloat", *sys.argv[1:]]),
            **options,
        )
    if as_json:
        click.echo(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison)
    if report is not None:
        _write_report(comparison, report)
        click.echo(f"Report: {report}", err=as_json)
    for candidate in candidates if update_card else ():
        click.echo(f"Card: {_update_card(comparison, candidate)}", err=as_json)
    sys.exit(_INTERRUPTED if comparison.partial else comparison.outcome.exit_code)


def _write_report(comparison: Comparison, path: Path) -> None:
    from minifloat.checkpoint.files import written_whole
    from minifloat.compare.pages.page import compare_page

    with written_whole(path) as file:
        file.write(compare_page(comparison).encode())


def _update_card(comparison: Comparison, name: str) -> Path:
    """Put what was found of one candidate, and of its variants, into its card."""
    from minifloat.compare.pages.card import card_section
    from minifloat.report.card import update_card

    found = [one for one in comparison.candidates if one.model.name == name or one.model.name.startswith(f"{name} (")]
    return update_card(name, card_section(replace(comparison, candidates=tuple(found))))
