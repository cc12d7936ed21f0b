"""What `check` answers, as a document: about one engine and machine, or about all of them for page and model card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from minifloat.deploy.check.judge import CheckReport, EngineVerdict, Reports, loads_in
from minifloat.deploy.check.rules import Finding, LoadVerdict
from minifloat.deploy.check.target import ENGINES
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.report import markdown
from minifloat.report.document import (
    Block,
    Bullets,
    Code,
    Column,
    Document,
    Folded,
    On,
    Section,
    Table,
    Text,
    columns,
    section,
)

#: Name of the section of a model card, in its markers.
DEPLOYMENT = "deployment"
#: Name of the model in the card's commands until `push` knows its id.
MODEL = "MODEL"
_SHOWN_LINES = 6  #: lines of evidence per finding; the JSON has all of them
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
    "tensorrt-llm": ("bash", "trtllm-serve {model}"),
    "transformers": (
        "python",
        "from transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("{model}", dtype="auto")',
    ),
    "minifloat": ("bash", "minifloat serve {model}"),
    "mlx": ("bash", "mlx_lm.server --model {model}"),
    "llama.cpp": ("bash", "llama-server --model FILE.gguf"),
    "ollama": ("bash", "ollama create NAME -f Modelfile"),
}
_NOTES = {"transformers": "to look at answers, not to serve: it decodes weights first"}


def document(report: CheckReport) -> Document:
    """Return the verdict, the kernels, then every finding with its evidence, its cure and its rule."""
    target = report.target
    scheme = f" as {report.scheme}" if report.scheme else ""
    gpus = f" x{target.tp}" if target.tp > 1 else ""
    plugin = f" with the plugin {target.plugin}" if target.plugin else ""
    machine = f"{target.hardware.name}{gpus} ({target.hardware.generation.name})"
    names = ["weights", "kernel", "computes with"]
    rows = [
        [f"{kind.value}, experts" if kernel.experts else kind.value, kernel.name, kernel.computes]
        for kind, kernel in report.kernels
    ]
    if any(kernel.without_flashinfer for _, kernel in report.kernels):
        names.append("without FlashInfer")
        for row, (_, kernel) in zip(rows, report.kernels, strict=True):
            row.append(kernel.without_flashinfer or "the same")
    return Document(
        report.model,
        [
            section(
                "",
                Text(f"{report.model}{scheme}, {report.layout or 'not quantized'}"),
                Text(report.contents) if report.contents else None,
                Text(f"{ENGINES[target.engine]}{plugin} on {machine}: {report.verdict.value}", "strong"),
                Table([Column(name, left=True) for name in names], rows) if rows else None,
            ),
            *(section("", Bullets(_finding_lines(finding))) for finding in report.findings),
        ],
    )


def _finding_lines(finding: Finding) -> list[str]:
    more = len(finding.evidence) - _SHOWN_LINES
    return [
        f"{finding.verdict.value}: {finding.problem}",
        *(f"  at     {line}" for line in finding.evidence[:_SHOWN_LINES]),
        *([f"         and {more} more"] if more > 0 else []),
        *([f"  cure   {finding.cure}"] if finding.cure else []),
        f"  rule   {finding.rule} ({finding.source})",
    ]


def verdict_section(verdicts: Iterable[EngineVerdict]) -> Section:
    """Return for a terminal where each engine loads a checkpoint, and the first reason against it."""
    blocks: list[Block] = [Text("Engines that load it, by the rules of minifloat check:")]
    for verdict in verdicts:
        cure = f"; cure: {verdict.cure}" if verdict.cure else ""
        reason = f"    {verdict.problem}{cure}" if verdict.problem else ""
        blocks += [Text(f"  {verdict}"), Text(reason, "soft")]
    return section("", *blocks, on=On.TERMINAL)


def deployment_section(reports: Reports, model: str) -> str:
    """Return the section of a model card about the engines that load it."""
    return markdown.write_section(DEPLOYMENT, Document("", [engines_section(reports, model)]))


def engines_section(reports: Reports, model: str) -> Section:
    """Return which engines load a checkpoint on which machines, why not, and the commands to serve it."""
    rows = [
        [ENGINES[engine], *(_CELLS[by_machine[name].verdict] if name in by_machine else "" for name in ENGINE_HARDWARE)]
        for engine, by_machine in reports.items()
    ]
    why = _reasons(reports, LoadVerdict)
    return section(
        "Where it loads",
        Table(columns("engine", *ENGINE_HARDWARE), rows),
        Bullets(_reasons(reports, [LoadVerdict.DEGRADED]), on=On.CARD),
        Folded("Why", [Bullets(why)], on=On.PAGE) if why else None,
        *_commands(reports, model),
        Text("The table is for one device of each. For reasons and sources:"),
        Code(f"minifloat check {model} --engine ENGINE --hardware HARDWARE"),
        on=On.PAGE | On.CARD,
    )


def _reasons(reports: Reports, verdicts: Iterable[LoadVerdict]) -> list[str]:
    """Return each finding of reports with some verdicts once, with the engines and machines that it is about."""
    wanted = set(verdicts)
    places: dict[str, dict[str, list[str]]] = {}
    for engine, by_machine in reports.items():
        for machine, report in by_machine.items():
            for finding in report.findings if report.verdict in wanted else ():
                text = f"{finding.problem}; {finding.cure}" if finding.cure else finding.problem
                places.setdefault(text, {}).setdefault(engine, []).append(machine)
    return [
        "; ".join(f"{ENGINES[engine]} on {', '.join(names)}" for engine, names in by_engine.items()) + f": {text}"
        for text, by_engine in places.items()
    ]


def _commands(reports: Reports, model: str) -> Iterator[Block]:
    for engine, by_machine in reports.items():
        if hardware := loads_in(by_machine):
            language, command = _COMMANDS[engine]
            note = f" ({_NOTES[engine]})" if engine in _NOTES else ""
            yield Text(f"{ENGINES[engine]}, on {', '.join(hardware)}{note}:", on=On.CARD)
            yield Code(command.format(model=model), language, on=On.CARD)
