"""`check_checkpoint`: whether an engine loads a checkpoint on a machine, with which kernels, and what goes wrong."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import open_headers
from minifloat.checkpoint.layout import is_gguf
from minifloat.deploy.check.engine_kernels import EngineKernel, kernel_for
from minifloat.deploy.check.rules import Finding, LoadVerdict, apply_rules
from minifloat.deploy.check.subject import Case, Kind, Subject, Weight
from minifloat.deploy.check.target import ENGINES, LOCAL, Target, machines_of
from minifloat.errors import TensorError, UsageError
from minifloat.model.layouts import choose_writer
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import get_scheme
from minifloat.report.document import ShortReport
from minifloat.report.text import layer_pattern

#: Names of the findings that come from no row of the rules.
_QUANTIZE_REFUSES = "quantize-refuses"
_KERNEL_NOT_KNOWN = "kernel-not-known"


@dataclass(frozen=True, repr=False)
class CheckReport(ShortReport):
    """Whether an engine will load a checkpoint, and why.

    Attributes:
        model: The folder, or the model of the hub, as the caller named it.
        scheme: The scheme that the model would be quantized to; None: the checkpoint was judged as it is.
        target: Engine and machine.
        layout: The layout in which it is, or would be, stored; None where nothing is quantized.
        kernels: The kernels that will multiply linears and experts of each kind, as far as they are known.
        findings: The rules that apply, the worst first.
        contents: Of a GGUF file: the bytes of each type, and the number of files.
    """

    model: str
    scheme: str | None
    target: Target
    layout: str | None
    kernels: tuple[tuple[Kind, EngineKernel], ...]
    findings: tuple[Finding, ...]
    contents: str = ""

    def headline(self) -> dict[str, str]:
        return {
            "model": self.model,
            "engine": f"{ENGINES[self.target.engine]} on {self.target.hardware.name}",
            "verdict": self.verdict.value,
            **({"because": self.findings[0].problem} if self.findings else {}),
        }

    @property
    def verdict(self) -> LoadVerdict:
        return max(
            (finding.verdict for finding in self.findings), key=lambda verdict: verdict.rank, default=LoadVerdict.LOADS
        )

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that keep the checkpoint from loading, or the model from answering correctly."""
        return tuple(finding for finding in self.findings if finding.verdict.is_failure)

    def require_loadable(self) -> tuple[str, ...]:
        """Raise an error if the engine would refuse the checkpoint or answer wrongly.

        Returns:
            Notes on findings that degrade the checkpoint or whose effect is not known.

        Raises:
            UsageError: The report has failures; the message names the rule, the modules and the cure.
        """
        if self.failures:
            first, num_more = self.failures[0], len(self.failures) - 1
            evidence = f" ({first.evidence[0]})" if first.evidence else ""
            raise UsageError(
                f"{self.target}: {first.verdict.value}: {first.problem}{evidence}; {first.cure} [rule {first.rule}]"
                + (f"; and {num_more} more, see minifloat check" if num_more else "")
            )
        return tuple(
            f"{self.target}: {finding.problem}"
            for finding in self.findings
            if finding.verdict in (LoadVerdict.DEGRADED, LoadVerdict.UNKNOWN)
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "scheme": self.scheme,
            "engine": self.target.engine,
            "engine_version": ENGINES[self.target.engine],
            "hardware": self.target.hardware.name,
            "tp": self.target.tp,
            "plugin": self.target.plugin,
            "layout": self.layout,
            "contents": self.contents,
            "verdict": self.verdict.name.lower(),
            "kernels": [
                {
                    "weights": kind.value,
                    "experts": kernel.experts,
                    "kernel": kernel.name,
                    "without_flashinfer": kernel.without_flashinfer,
                    "computes": kernel.computes,
                    "source": kernel.source,
                    "seen": kernel.confirmed,
                }
                for kind, kernel in self.kernels
            ],
            "findings": [
                {
                    "rule": finding.rule,
                    "verdict": finding.verdict.name.lower(),
                    "problem": finding.problem,
                    "cure": finding.cure,
                    "source": finding.source,
                    "evidence": list(finding.evidence),
                }
                for finding in self.findings
            ],
        }


def check_checkpoint(
    model: str | os.PathLike[str],
    target: str | Target,
    *,
    scheme: str | None = None,
    layout: str | None = None,
    overrides: Sequence[str | Override] = (),
    revision: str | None = None,
) -> CheckReport:
    """Judge a checkpoint, or the one that `quantize` would write.

    Args:
        model: A folder in Hugging Face layout, a GGUF file, or a model of the hub, whose weights stay there.
        target: ``"vllm:h100:tp4"``, or a `Target`.
        scheme: For a model that is not quantized: the scheme to quantize it to, with calibrated static scales.
        layout: With `scheme`: a name of `layouts.WRITERS`; by default as `quantize_checkpoint` chooses it.
        overrides: With `scheme`: as in `quantize_checkpoint`.
        revision: Branch, tag or commit of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.

    Returns:
        The verdict, with its reasons.

    Raises:
        UsageError: The target or the scheme is unknown, or `overrides` come without `scheme`.
        AlreadyQuantizedError: `scheme` is given and the model is already quantized.
        CheckpointError: The files are damaged, or are no checkpoint.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        TensorError: The shapes of codes and scales do not match.
    """
    parsed_target = Target.parse(target) if isinstance(target, str) else target
    if scheme is None and overrides:
        raise UsageError("overrides need a scheme: they change what quantize would write")
    if scheme is None and is_gguf(os.fspath(model)) and Path(model).is_file():
        return judge(str(model), None, Case(Subject.of_file(inspect_checkpoint(model)), parsed_target))
    with open_headers(model, revision=revision) as checkpoint:
        if scheme is None:
            return judge(str(model), None, Case(Subject.of_checkpoint(checkpoint), parsed_target))
        refuse_contradictions(checkpoint.config, checkpoint.tensors, checkpoint.path)
        chosen_scheme = get_scheme(scheme)
        writer = choose_writer(layout, checkpoint.config, chosen_scheme)
        parsed_overrides = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
        try:
            writer.check(chosen_scheme)
            plan = make_plan(checkpoint, chosen_scheme, writer, parsed_overrides)
        except (TensorError, UsageError) as error:
            finding = Finding(
                _QUANTIZE_REFUSES, LoadVerdict.REFUSED, f"minifloat quantize refuses: {error}", "", "this version", ()
            )
            return CheckReport(str(model), scheme, parsed_target, writer.name, (), (finding,))
        return judge(str(model), scheme, Case(Subject.of_plan(checkpoint, plan), parsed_target))


def require_loadable(checkpoint: Checkpoint, plan: QuantizationPlan, target: str | Target) -> tuple[str, ...]:
    """Raise an error if the target's engine would refuse the output of a plan or answer wrongly."""
    parsed_target = Target.parse(target) if isinstance(target, str) else target
    return judge(
        str(checkpoint.path), plan.scheme.name, Case(Subject.of_plan(checkpoint, plan), parsed_target)
    ).require_loadable()


def judge(model: str, scheme: str | None, case: Case) -> CheckReport:
    """Apply the rules of the case's engine, and name its kernels."""
    findings = list(apply_rules(case))
    refused = any(finding.verdict.is_failure for finding in findings)
    unknown = [kind for kind in case.subject.kinds if not _is_known(case, kind)]
    if unknown and not refused:
        findings.append(_not_known(case, unknown))
    kernels = () if refused else tuple(_kernels(case))
    findings.sort(key=lambda finding: -finding.verdict.rank)
    contents = "" if case.subject.file is None else case.subject.file.contents
    return CheckReport(model, scheme, case.target, case.subject.layout, kernels, tuple(findings), contents)


def _is_known(case: Case, kind: Kind) -> bool:
    """Return whether a kernel is known for weights of a kind; that of linears is enough for experts too."""
    return any(kernel_for(case, kind, experts=experts) for experts in (False, True))


def _kernels(case: Case) -> Iterator[tuple[Kind, EngineKernel]]:
    """Yield the kernels of linears, then those of experts, as far as they are known."""
    for experts in (False, True):
        present = {weight.kind for weight in case.weights(experts=experts)}
        for kind in case.subject.kinds:
            kernel = kernel_for(case, kind, experts=experts) if kind in present else None
            if kernel is not None:
                yield kind, kernel


def _not_known(case: Case, kinds: Sequence[Kind]) -> Finding:
    """Return the finding that the kernels of these kinds are not known."""
    return Finding(
        _KERNEL_NOT_KNOWN,
        LoadVerdict.UNKNOWN,
        f"nothing is known here of {case.target.engine} on {case.target.hardware.name} with "
        f"{' and '.join(kind.value for kind in kinds)} in layout {case.subject.layout}",
        "try it with a small model",
        ENGINES[case.target.engine],
        (),
    )


_LAYER = re.compile(r".*?\.\d+(?=\.)")

Reports = Mapping[str, Mapping[str, CheckReport]]


def check_everywhere(subject: Subject, model: str) -> dict[str, dict[str, CheckReport]]:
    """Return the report of every engine on one device of each of its machines: engine -> machine -> report."""
    subject = _distinct_layers(subject)
    return {
        engine: {
            name: judge(model, None, Case(subject, Target(engine, hardware)))
            for name, hardware in machines_of(engine).items()
        }
        for engine in ENGINES
        if LOCAL.get(engine, subject.layout) == subject.layout
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
    return [engine for engine in ("vllm", "sglang") if loads_in(reports.get(engine, {}))]


def library_name(reports: Reports) -> str:
    """Return the library that hubs show a snippet for: transformers only if it loads the model."""
    if "mlx" in reports:
        return "mlx"
    if "llama.cpp" in reports:
        return "gguf"
    return "transformers" if loads_in(reports["transformers"]) else "minifloat"


#: The engine of this package, which every scheme is made for.
OWN = "minifloat"


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine loads a checkpoint, on which machines, and why not on the others."""

    engine: str
    loads: tuple[str, ...]
    degraded: tuple[str, ...]
    unknown: tuple[str, ...]
    wrong: tuple[str, ...]
    refused: tuple[str, ...]
    problem: str
    cure: str

    @property
    def runs_on(self) -> tuple[str, ...]:
        """Machines on which it loads, including those where it is degraded."""
        return (*self.loads, *self.degraded)

    def __str__(self) -> str:
        """Return one sentence: where it loads, and where not."""
        places = (
            ("loads on", self.loads),
            ("with less than it promises on", self.degraded),
            ("not known on", self.unknown),
            ("answers wrongly on", self.wrong),
            ("does not load on", self.refused),
        )
        total = sum(len(names) for _, names in places)
        clauses = [f"{verb} {'all' if len(names) == total else ', '.join(names)}" for verb, names in places if names]
        return f"{ENGINES[self.engine]}: {'; '.join(clauses)}"

    def to_dict(self) -> dict[str, Any]:
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return values | {"version": ENGINES[self.engine]}


def engine_verdicts(reports: Mapping[str, Mapping[str, CheckReport]]) -> tuple[EngineVerdict, ...]:
    """Return a verdict for each engine."""
    return tuple(_verdict(engine, by_machine) for engine, by_machine in reports.items())


def verdicts_of(subject: Subject) -> tuple[EngineVerdict, ...]:
    """Return the verdict of each engine on a checkpoint or a plan."""
    return engine_verdicts(check_everywhere(subject, ""))


def others_that_load(verdicts: tuple[EngineVerdict, ...]) -> tuple[str, ...]:
    """Return the engines other than minifloat that load the checkpoint on some machine."""
    return tuple(verdict.engine for verdict in verdicts if verdict.engine != OWN and verdict.runs_on)


def short_name(engine: str) -> str:
    """Return the name of an engine as it writes itself, without its version: ``"vLLM"``."""
    return ENGINES[engine].split()[0].rstrip(",")


def _verdict(engine: str, reports: Mapping[str, CheckReport]) -> EngineVerdict:
    def on(wanted: LoadVerdict) -> tuple[str, ...]:
        return tuple(name for name, report in reports.items() if report.verdict is wanted)

    verdicts = {report.verdict for report in reports.values()}
    worst = LoadVerdict.WRONG if LoadVerdict.WRONG in verdicts else max(verdicts, key=lambda verdict: verdict.rank)
    first = [report.findings[0] for report in reports.values() if report.verdict is worst and report.findings]
    shown: Finding | None = None
    if first and worst is not LoadVerdict.LOADS:
        rule = Counter(finding.rule for finding in first).most_common(1)[0][0]
        shown = next(finding for finding in first if finding.rule == rule)
    return EngineVerdict(
        engine=engine,
        loads=on(LoadVerdict.LOADS),
        degraded=on(LoadVerdict.DEGRADED),
        unknown=on(LoadVerdict.UNKNOWN),
        wrong=on(LoadVerdict.WRONG),
        refused=on(LoadVerdict.REFUSED),
        problem="" if shown is None else shown.problem,
        cure="" if shown is None else shown.cure,
    )
