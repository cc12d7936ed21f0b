"""The deployment section of a model card: which engines load the checkpoint on which machines, with which commands.

The answers are those of `minifloat check`, from the same tables; an engine that loads it on no machine gets no command.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from minifloat.deploy.check import ENGINE_HARDWARE, ENGINES, CheckReport, LoadVerdict, Target
from minifloat.deploy.check.judge import judge
from minifloat.deploy.check.subject import Case, Subject, Weight
from minifloat.report.card import markdown, markers
from minifloat.report.text import layer_pattern

BEGIN, END = markers("deployment")
_LAYER = re.compile(r".*?\.\d+(?=\.)")
#: Texts of the table's cells; `_degradations` lists the reasons below the table.
_CELLS = {
    LoadVerdict.LOADS: "yes",
    LoadVerdict.DEGRADED: "yes, but",
    LoadVerdict.UNKNOWN: "not known",
    LoadVerdict.WRONG: "no",
    LoadVerdict.REFUSED: "no",
}
_COMMANDS = {
    "vllm": ("bash", "vllm serve {model}"),
    "sglang": ("bash", "python -m sglang.launch_server --model-path {model}"),
    "transformers": (
        "python",
        "from transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("{model}", dtype="auto")',
    ),
    "minifloat": ("bash", "minifloat serve {model}"),
}
_NOTES = {"transformers": "to look at answers, not to serve: it decodes weights first"}

Reports = Mapping[str, Mapping[str, CheckReport]]


def check_everywhere(subject: Subject, model: str) -> dict[str, dict[str, CheckReport]]:
    """Return the report of every engine on one device of every machine: engine -> machine -> report."""
    subject = _distinct_layers(subject)
    return {
        engine: {
            name: judge(model, None, Case(subject, Target(engine, hardware)))
            for name, hardware in ENGINE_HARDWARE.items()
        }
        for engine in ENGINES
    }


def _distinct_layers(subject: Subject) -> Subject:
    """Return the model without layers that equal an earlier one, so that the rules have fewer weights to look at."""
    layers: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        match = _LAYER.match(weight.module)
        layers.setdefault(match[0] if match else weight.module, []).append(weight)
    first: dict[Hashable, list[Weight]] = {}
    for name, weights in layers.items():
        inner = tuple(
            (weight.module.removeprefix(name), weight.shape, weight.spec, weight.activation) for weight in weights
        )
        first.setdefault((layer_pattern(name), inner), weights)
    return replace(subject, weights=tuple(weight for weights in first.values() for weight in weights))


def loads_in(reports: Mapping[str, CheckReport]) -> list[str]:
    """Return the machines on which an engine loads the checkpoint, including those where it is degraded."""
    return [name for name, report in reports.items() if report.verdict in (LoadVerdict.LOADS, LoadVerdict.DEGRADED)]


def engine_tags(reports: Reports) -> list[str]:
    """Return the servers that load the model on some machine, as tags of its card."""
    return [engine for engine in ("vllm", "sglang") if loads_in(reports[engine])]


def library_name(reports: Reports) -> str:
    """Return the library that hubs show a snippet for: transformers only if it loads the model."""
    return "transformers" if loads_in(reports["transformers"]) else "minifloat"


def cell_text(report: CheckReport) -> str:
    """Return the text of a table's cell: whether an engine loads the checkpoint on a machine."""
    return _CELLS[report.verdict]


def deployment_section(reports: Reports, model: str) -> str:
    """Return the section as Markdown, with its markers."""
    lines = [
        BEGIN,
        "## Deployment",
        "",
        f"| loads in | {' | '.join(ENGINE_HARDWARE)} |",
        f"|---|{'---|' * len(ENGINE_HARDWARE)}",
        *(
            f"| {ENGINES[engine]} | {' | '.join(cell_text(report) for report in by_machine.values())} |"
            for engine, by_machine in reports.items()
        ),
        "",
        *_degradations(reports),
        *_commands(reports, model),
        "The table is for one device of each, by",
        f"`minifloat check {model} --engine ENGINE --hardware HARDWARE`, which gives reasons and sources.",
        END,
    ]
    return "\n".join(lines) + "\n"


def _degradations(reports: Reports) -> Iterator[str]:
    """Yield a line for each problem of machines on which the checkpoint loads degraded."""
    places_by_text: dict[str, dict[str, list[str]]] = {}
    for engine, by_machine in reports.items():
        for hardware, report in by_machine.items():
            for finding in report.findings if report.verdict is LoadVerdict.DEGRADED else ():
                text = f"{finding.problem}; {finding.cure}" if finding.cure else finding.problem
                places_by_text.setdefault(text, {}).setdefault(engine, []).append(hardware)
    for text, places in places_by_text.items():
        names = "; ".join(f"{engine} on {', '.join(hardware)}" for engine, hardware in places.items())
        yield f"- {names}: {markdown(text)}"
    if places_by_text:
        yield ""


def _commands(reports: Reports, model: str) -> Iterator[str]:
    for engine, by_machine in reports.items():
        hardware = loads_in(by_machine)
        if not hardware:
            continue
        language, command = _COMMANDS[engine]
        note = f" ({_NOTES[engine]})" if engine in _NOTES else ""
        yield from (f"{ENGINES[engine]}, on {', '.join(hardware)}{note}:", "")
        yield from (f"```{language}", command.format(model=model), "```", "")
