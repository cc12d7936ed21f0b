"""The command `compare`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minifloat.commands.options import (
    FOLDER,
    MODEL,
    POSITIVE,
    env_option,
    json_option,
    revision_option,
    show,
    threads_option,
    use_threads,
)
from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.commands.report import add_to_report, no_report_option, require_folders, require_writable, write_page
from minifloat.errors import UsageError
from minifloat.evaluate.compare.options import CompareOptions, ScoringOptions, ServedOptions, Tolerance

if TYPE_CHECKING:
    from minifloat.evaluate.compare.result import Comparison

_INTERRUPTED = 130
#: Parameters that say nothing about a server.
_OF_MODELS = {field.name for field in fields(CompareOptions)} - {field.name for field in fields(ScoringOptions)}
_NOT_FOR_SERVERS = _OF_MODELS | {"attribute_seconds", "update_card"}


class _Fraction(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number, or a percentage as a fraction: ``1%`` is 0.01."""

    name = "fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"expected a number or a percentage, got {value!r}", param, ctx)


_BEHAVIOR = "Prompts with tools or JSON schemas, as JSON Lines, that the models answer.  [without FILE: built in]"
_FRACTION = {"type": _Fraction(), "metavar": "FRACTION"}


@click.command(cls=GroupedCommand)
@click.argument("baseline", type=MODEL)
@click.argument("candidates", type=MODEL, nargs=-1)
@revision_option("BASELINE")
@click.option("--served", metavar="URL", help="Instead of CANDIDATES: the model that this server runs.")
@click.option("--served-model", metavar="NAME", help="Its name on the server.  [default: the server's first]")
@click.option("--served-baseline", metavar="URL", help="The server that answers --behavior as BASELINE; same key.")
@env_option("--api-key", metavar="KEY", help="The server's key; better in the environment.")
@click.option(
    "--data", multiple=True, metavar="DATA", help="Text, as for `calibrate`; repeatable.  [default: built in]"
)
@options_from(
    ScoringOptions,
    only=("window", "max_tokens", "dtype", "device", "behavior", "behavior_tokens"),
    window={"flags": ("--window", "--max-length")},
    behavior={"is_flag": False, "flag_value": "builtin", "metavar": "FILE", "help": _BEHAVIOR},
)
@options_from(
    CompareOptions,
    only=("prompts", "new_tokens", "variants", "weight_only", "kv_cache", "lm_head", "activations", "resume"),
    resume={"metavar": "DIR", "type": FOLDER},
)
@threads_option()
@click.option("--report", type=FOLDER, help="Write a report of all CANDIDATES as one HTML file.")
@no_report_option()
@click.option("--update-card", is_flag=True, help="Write the numbers into the README.md of each CANDIDATE.")
@json_option()
@options_from(
    Tolerance,
    group="Tolerance",
    max_ppl_increase=_FRACTION | {"default": "1%"},
    min_same_top1=_FRACTION | {"default": "92%", "flags": ("--min-top1",)},
    margin=_FRACTION | {"default": "10%"},
    max_behavior_loss=_FRACTION | {"default": "10%"},
)
@click.option("--attribute", is_flag=True, help="Find out which modules do the damage, and what to keep in BF16.")
@click.option(
    "--attribute-seconds",
    default=120.0,
    show_default=True,
    type=POSITIVE,
    help="Time of its search; the check of what it suggests comes after.",
)
@click.option("--tasks", metavar="NAME,NAME", help="Run tasks of lm-evaluation-harness (extra: eval).")
@options_from(CompareOptions, only=("task_path", "task_limit"))
def compare(
    baseline: str,
    candidates: tuple[str, ...],
    served: str | None,
    data: tuple[str, ...],
    threads: int | None,
    report: Path | None,
    no_report: bool,
    update_card: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Is each of CANDIDATES, or a running server, still the same model as BASELINE? Compare them on text and judge.

    Perplexity, KL divergence and same top-1 (the share of tokens at which both have the same most
    probable token) come with 95% intervals. Exit status: 0 if every candidate is within the
    tolerance, 1 if one is not, 3 if the text is too short to decide, 130 after Ctrl-C, which reports what was measured
    by then.
    """
    if values["behavior"] is not None and Path(values["behavior"]).is_dir():
        raise UsageError(
            f"--behavior: {values['behavior']} is a folder; name a file, or put the option behind the models"
        )
    if bool(candidates) == (served is not None):
        raise UsageError("name CANDIDATES, or the address of a server with --served")
    if values["served_baseline"] is not None and (served is None or values["behavior"] is None):
        raise UsageError("--served-baseline answers the prompts of --behavior beside --served: state both")
    if update_card:
        require_folders(candidates)
    require_writable(report, "--report")
    from minifloat.serve.starting import import_torch, starting

    with starting():
        if values["device"] == "cpu":
            import_torch()
        use_threads(threads)
        from minifloat.commands.progress import progress_bar
        from minifloat.evaluate.compare.document import document

    shared = {"tolerance": build(Tolerance, values), "command": shlex.join(["minifloat", *sys.argv[1:]])}
    with progress_bar(enabled=not as_json) as progress:
        if served is None:
            from minifloat.evaluate.compare.run import compare_models

            values["tasks"] = tuple(filter(None, (values["tasks"] or "").split(",")))
            values["attribute"] = values["attribute_seconds"] if values["attribute"] else 0.0
            options = build(CompareOptions, values, **shared)
            comparison = compare_models(baseline, candidates, data, options, progress=progress)
        else:
            from minifloat.evaluate.compare.served import compare_served

            _refuse_options_of_models()
            of_server = build(
                ServedOptions, values, model=values["served_model"], baseline_url=values["served_baseline"], **shared
            )
            comparison = compare_served(baseline, served, data, of_server, progress=progress)
    show(comparison, document, as_json=as_json)
    if report is not None:
        write_page(report, document(comparison), err=as_json)
    for candidate in () if no_report or comparison.partial else candidates:
        add_to_report(candidate, comparison, err=as_json)
    for candidate in candidates if update_card else ():
        click.echo(f"Card: {_update_card(comparison, candidate)}", err=as_json)
    sys.exit(_INTERRUPTED if comparison.partial else comparison.outcome.exit_code)


def _refuse_options_of_models() -> None:
    context = click.get_current_context()
    for name in sorted(_NOT_FOR_SERVERS):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is about models that are loaded here, not about a server")


def _update_card(comparison: Comparison, name: str) -> Path:
    """Write the results of one candidate, and of its variants, into its card."""
    from minifloat.evaluate.compare.document import document
    from minifloat.report import markdown
    from minifloat.report.markdown import update_card

    results = tuple(
        result
        for result in comparison.candidates
        if result.model.name == name or result.model.name.startswith(f"{name} (")
    )
    return update_card(name, markdown.write_section("compare", document(replace(comparison, candidates=results))))
