"""The command `compare`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minifloat.commands.options import (
    COUNT,
    FOLDER,
    MODEL,
    POSITIVE,
    activations_option,
    device_option,
    env_option,
    json_option,
    lm_head_option,
    pass_params,
    print_json,
    revision_option,
    threads_option,
    use_threads,
)
from minifloat.commands.report import add_to_report, no_report_option
from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.checkpoint.progress import Progress
    from minifloat.evaluate.compare import Comparison, Tolerance

_INTERRUPTED = 130
#: Parameters that say nothing about a server.
_NOT_FOR_SERVERS = (
    "prompts",
    "new_tokens",
    "attribute",
    "attribute_seconds",
    "tasks",
    "task_path",
    "task_limit",
    "variants",
    "weight_only",
    "kv_cache",
    "lm_head",
    "activations",
    "resume",
    "update_card",
)


@dataclass(frozen=True)
class CompareParams:
    """The parameters of `compare`, named as its options."""

    baseline: str
    candidates: tuple[str, ...]
    revision: str | None
    served: str | None
    served_model: str | None
    api_key: str | None
    data: tuple[str, ...]
    window: int | None
    max_tokens: int | None
    max_ppl_increase: float
    max_kl: float
    min_same_top1: float
    margin: float
    prompts: int
    new_tokens: int
    attribute: bool
    attribute_seconds: float
    tasks: str | None
    task_path: Path | None
    task_limit: int | None
    variants: bool
    weight_only: bool
    kv_cache: str
    lm_head: str
    activations: str
    dtype: str | None
    device: str
    threads: int | None
    resume: Path | None
    report: Path | None
    no_report: bool
    update_card: bool
    as_json: bool

    def tolerance(self) -> Tolerance:
        """Return the bounds of the verdict."""
        from minifloat.evaluate.compare import Tolerance

        return Tolerance(self.max_ppl_increase, self.max_kl, self.min_same_top1, self.margin)


def parse_fraction(text: str) -> float:
    """Return a number, or a percentage as a fraction: ``1%`` is 0.01."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    return float(number) / 100 if percent else float(number)


@click.command()
@click.argument("baseline", type=MODEL)
@click.argument("candidates", type=MODEL, nargs=-1)
@revision_option("BASELINE")
@click.option("--served", metavar="URL", help="Instead of CANDIDATES: the model that this server runs.")
@click.option("--served-model", metavar="NAME", help="Its name on the server.  [default: the server's first]")
@env_option("--api-key", metavar="KEY", help="The server's key; better in the environment.")
@click.option(
    "--data", multiple=True, metavar="DATA", help="Text, as for `calibrate`; repeatable.  [default: built in]"
)
@click.option(
    "--window",
    "--max-length",
    "window",
    type=click.IntRange(min=2),
    help="Tokens per window, up to the context of the models; above 512, KL is shown by position.  [default: 256]",
)
@click.option("--max-tokens", type=click.IntRange(min=2), help="Stop after this many tokens of each text.")
@click.option(
    "--max-ppl-increase",
    type=parse_fraction,
    metavar="FRACTION",
    default="1%",
    show_default=True,
    help="Tolerance: largest increase of perplexity, per text.",
)
@click.option("--max-kl", type=float, default=0.02, show_default=True, help="Tolerance: largest mean nats per token.")
@click.option(
    "--min-top1",
    "min_same_top1",
    type=parse_fraction,
    metavar="FRACTION",
    default="92%",
    show_default=True,
    help="Tolerance: smallest same top-1, the share of tokens at which both have the same most probable token.",
)
@click.option(
    "--margin",
    type=parse_fraction,
    metavar="FRACTION",
    default="10%",
    show_default=True,
    help="Where a bound lies in the interval: pass if the interval ends at most this share of the allowed loss beyond.",
)
@click.option("--prompts", default=32, show_default=True, type=click.IntRange(min=0), help="To continue greedily.")
@click.option("--new-tokens", default=64, show_default=True, type=COUNT, help="Tokens per continuation.")
@click.option("--attribute", is_flag=True, help="Find out which modules do the damage, and what to keep in BF16.")
@click.option(
    "--attribute-seconds",
    default=120.0,
    show_default=True,
    type=POSITIVE,
    help="Time of its search; the check of what it suggests comes after.",
)
@click.option("--tasks", metavar="NAME,NAME", help="Run tasks of lm-evaluation-harness (extra: eval).")
@click.option("--task-path", type=FOLDER, help="A folder of task files.")
@click.option("--task-limit", type=COUNT, help="Items of each task.  [default: all]")
@click.option("--variants", is_flag=True, help="Also without FP8 inputs, and without an FP8 KV cache, where declared.")
@click.option("--weight-only", is_flag=True, help="Do not quantize inputs, whatever the checkpoint says.")
@click.option(
    "--kv-cache",
    type=click.Choice(["auto", "none", "fp8"]),
    default="auto",
    show_default=True,
    help="auto: as each checkpoint declares.",
)
@lm_head_option("the CANDIDATES")
@activations_option("the CANDIDATES")
@click.option("--dtype", help="bfloat16, float16 or float32, for all.  [default: that of each config.json]")
@device_option()
@threads_option()
@click.option("--resume", type=FOLDER, metavar="DIR", help="Keep scores in this folder; the same command continues.")
@click.option("--report", type=FOLDER, help="Write a report of all CANDIDATES as one HTML file.")
@no_report_option()
@click.option("--update-card", is_flag=True, help="Write the numbers into the README.md of each CANDIDATE.")
@json_option()
@pass_params(CompareParams)
def compare(params: CompareParams) -> None:
    """Is each of CANDIDATES, or a running server, still the same model as BASELINE? Compare them on text and judge.

    Perplexity, KL divergence and same top-1 (the share of tokens at which both have the same most
    probable token) come with 95% intervals. Exit status: 0 if every candidate is within the
    tolerance, 1 if one is not, 3 if the text is too short to decide, 130 after Ctrl-C, which reports what was measured
    by then.
    """
    if bool(params.candidates) == (params.served is not None):
        raise UsageError("name CANDIDATES, or the address of a server with --served")
    if params.update_card:
        from minifloat.checkpoint.files import resolve_folder

        for candidate in params.candidates:
            resolve_folder(candidate)  # raises for a model of the hub, whose card is not a local file
    use_threads(params.threads)
    from minifloat.commands.progress import progress_bar
    from minifloat.evaluate.compare.document import document
    from minifloat.report import terminal

    report = params.report
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise UsageError(f"--report {report}: not a file in a folder that exists")
    with progress_bar(enabled=not params.as_json) as progress:
        comparison = _measure(params, progress) if params.served is None else _measure_served(params, progress)
    if params.as_json:
        print_json(comparison)
    else:
        terminal.write(document(comparison))
    if report is not None:
        _write_report(comparison, report)
        click.echo(f"Report: {report}", err=params.as_json)
    for candidate in () if params.no_report or comparison.partial else params.candidates:
        add_to_report(candidate, comparison, err=params.as_json)
    for candidate in params.candidates if params.update_card else ():
        click.echo(f"Card: {_update_card(comparison, candidate)}", err=params.as_json)
    sys.exit(_INTERRUPTED if comparison.partial else comparison.outcome.exit_code)


def _measure(params: CompareParams, progress: Progress | None) -> Comparison:
    from minifloat.evaluate.compare import CompareOptions, compare_models

    options = CompareOptions(
        revision=params.revision,
        window=params.window,
        max_tokens=params.max_tokens,
        tolerance=params.tolerance(),
        prompts=params.prompts,
        new_tokens=params.new_tokens,
        attribute=params.attribute_seconds if params.attribute else 0.0,
        tasks=tuple(filter(None, (params.tasks or "").split(","))),
        task_path=params.task_path,
        task_limit=params.task_limit,
        variants=params.variants,
        weight_only=params.weight_only,
        kv_cache=params.kv_cache,
        lm_head=params.lm_head,
        activations=params.activations,
        dtype=params.dtype,
        device=params.device,
        resume=params.resume,
        command=shlex.join(["minifloat", *sys.argv[1:]]),
    )
    return compare_models(params.baseline, params.candidates, params.data, options, progress=progress)


def _measure_served(params: CompareParams, progress: Progress | None) -> Comparison:
    """Judge a server."""
    from minifloat.evaluate.compare import ServedOptions
    from minifloat.evaluate.compare.served import compare_served

    context = click.get_current_context()
    for name in _NOT_FOR_SERVERS:
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is about models that are loaded here, not about a server")
    options = ServedOptions(
        model=params.served_model,
        api_key=params.api_key,
        revision=params.revision,
        window=params.window,
        max_tokens=params.max_tokens,
        tolerance=params.tolerance(),
        dtype=params.dtype,
        device=params.device,
        command=shlex.join(["minifloat", *sys.argv[1:]]),
    )
    return compare_served(params.baseline, str(params.served), params.data, options, progress=progress)


def _write_report(comparison: Comparison, path: Path) -> None:
    from minifloat.checkpoint.files import written_whole
    from minifloat.evaluate.compare.document import document
    from minifloat.report import html

    with written_whole(path) as file:
        file.write(html.write(document(comparison)).encode())


def _update_card(comparison: Comparison, name: str) -> Path:
    """Write the results of one candidate, and of its variants, into its card."""
    from minifloat.evaluate.compare.document import document
    from minifloat.report import markdown
    from minifloat.report.card import update_card

    results = tuple(
        result
        for result in comparison.candidates
        if result.model.name == name or result.model.name.startswith(f"{name} (")
    )
    return update_card(name, markdown.write_section("compare", document(replace(comparison, candidates=results))))
