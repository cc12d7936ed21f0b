"""The deployment section of a model card: which engine loads this checkpoint where, and with what command.

The answers are those of `minifloat check`, from the same tables; an engine that loads it nowhere gets no command.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from minifloat.check import ENGINES, HARDWARE, CheckReport, Target, Verdict
from minifloat.check.judge import judge
from minifloat.check.subject import Subject, Weight
from minifloat.check.verdict import Case
from minifloat.report.card import markdown, markers
from minifloat.report.text import layer_pattern

BEGIN, END = markers("deployment")
_LAYER = re.compile(r".*?\.\d+(?=\.)")
#: In the table; the reasons are beside it.
_CELLS = {
    Verdict.LOADS: "yes",
    Verdict.DEGRADED: "yes, but",
    Verdict.UNKNOWN: "not known",
    Verdict.WRONG: "no",
    Verdict.REFUSED: "no",
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
    """What `check` says of every engine on every hardware that it knows, on one device."""
    subject = _layers_once(subject)
    return {
        engine: {
            name: judge(model, None, Case(subject, Target(engine, hardware))) for name, hardware in HARDWARE.items()
        }
        for engine in ENGINES
    }


def _layers_once(subject: Subject) -> Subject:
    """A model without the layers that are as an earlier one: rules look into layers, and so many need not be seen."""
    layers: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        match = _LAYER.match(weight.module)
        layers.setdefault(match[0] if match else weight.module, []).append(weight)
    first: dict[Hashable, list[Weight]] = {}
    for name, weights in layers.items():
        inner = tuple((one.module.removeprefix(name), one.shape, one.spec, one.activation) for one in weights)
        first.setdefault((layer_pattern(name), inner), weights)
    return replace(subject, weights=tuple(weight for weights in first.values() for weight in weights))


def loads_in(reports: Mapping[str, CheckReport]) -> list[str]:
    """The hardware on which an engine loads it, perhaps with less than it promises."""
    return [name for name, report in reports.items() if report.verdict in (Verdict.LOADS, Verdict.DEGRADED)]


def deployment_section(reports: Reports, model: str) -> str:
    """The section as Markdown, with the markers around it.

    Args:
        reports: Of `check_everywhere`.
        model: What the commands call it.
    """
    lines = [
        BEGIN,
        "## Deployment",
        "",
        f"| loads in | {' | '.join(HARDWARE)} |",
        f"|---|{'---|' * len(HARDWARE)}",
        *(
            f"| {ENGINES[engine]} | {' | '.join(_CELLS[report.verdict] for report in found.values())} |"
            for engine, found in reports.items()
        ),
        "",
        *_buts(reports),
        *_commands(reports, model),
        "The table is for one device of each, by",
        f"`minifloat check {model} --engine ENGINE --hardware HARDWARE`, which gives reasons and sources.",
        END,
    ]
    return "\n".join(lines) + "\n"


def _buts(reports: Reports) -> Iterator[str]:
    """Where it loads with less than it promises: what is less."""
    where: dict[str, dict[str, list[str]]] = {}
    for engine, found in reports.items():
        for hardware, report in found.items():
            for finding in report.findings if report.verdict is Verdict.DEGRADED else ():
                text = f"{finding.problem}; {finding.cure}" if finding.cure else finding.problem
                where.setdefault(text, {}).setdefault(engine, []).append(hardware)
    for text, places in where.items():
        names = "; ".join(f"{engine} on {', '.join(hardware)}" for engine, hardware in places.items())
        yield f"- {names}: {markdown(text)}"
    if where:
        yield ""


def _commands(reports: Reports, model: str) -> Iterator[str]:
    for engine, found in reports.items():
        hardware = loads_in(found)
        if not hardware:
            continue
        language, command = _COMMANDS[engine]
        note = f" ({_NOTES[engine]})" if engine in _NOTES else ""
        yield from (f"{ENGINES[engine]}, on {', '.join(hardware)}{note}:", "")
        yield from (f"```{language}", command.format(model=model), "```", "")
