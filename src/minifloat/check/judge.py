"""`check_checkpoint`: will this engine load this checkpoint there, what will it run, and what goes wrong.

Headers and config are read, nothing else, and no engine is asked: the answer takes as long as opening the files. For a
model that is not quantized yet, what `quantize` would make of it is judged, from the same plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifloat.check.kernels import Kernel, kernel_for
from minifloat.check.rules import RULES
from minifloat.check.subject import Kind, Subject
from minifloat.check.verdict import ENGINES, Case, Finding, Target, Verdict, apply_rules
from minifloat.checkpoint import Checkpoint
from minifloat.errors import ShapeError, UsageError
from minifloat.hub import open_headers
from minifloat.layouts import compressed_tensors, get_writer, gpt_oss
from minifloat.numerics.scheme import get_scheme
from minifloat.plan.quantization import Override, Plan, make_plan

_UNPLANNED = "quantize-refuses"
_UNKNOWN = "kernel-not-known"


@dataclass(frozen=True)
class CheckReport:
    """The answer.

    Attributes:
        model: The folder, or the model of the hub, as it was given.
        scheme: What it would be quantized to; None: it was judged as it is.
        target: Where it is to run.
        layout: As it is, or would be, stored; None where nothing is quantized.
        kernels: What will multiply each kind of weight, as far as it is known.
        findings: The rules that apply, the worst first.
    """

    model: str
    scheme: str | None
    target: Target
    layout: str | None
    kernels: tuple[tuple[Kind, Kernel], ...]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        return max((finding.verdict for finding in self.findings), key=lambda one: one.rank, default=Verdict.LOADS)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What keeps it from loading, or from answering rightly."""
        return tuple(finding for finding in self.findings if finding.verdict.is_failure)

    def require_loadable(self) -> tuple[str, ...]:
        """Refuse what would not load, or would answer wrongly.

        Returns:
            Notes on what is less than it promises there.

        Raises:
            UsageError: It would; the message names the rule, the modules and the cure.
        """
        if self.failures:
            first, more = self.failures[0], len(self.failures) - 1
            at = f" ({first.evidence[0]})" if first.evidence else ""
            raise UsageError(
                f"{self.target}: {first.verdict.value}: {first.problem}{at}; {first.cure} [rule {first.rule}]"
                + (f"; and {more} more, see minifloat check" if more else "")
            )
        return tuple(
            f"{self.target}: {finding.problem}"
            for finding in self.findings
            if finding.verdict in (Verdict.DEGRADED, Verdict.UNKNOWN)
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "model": self.model,
            "scheme": self.scheme,
            "engine": self.target.engine,
            "engine_version": ENGINES[self.target.engine],
            "hardware": self.target.hardware.name,
            "tp": self.target.tp,
            "layout": self.layout,
            "verdict": self.verdict.name.lower(),
            "kernels": [
                {"weights": kind.value, "kernel": kernel.name, "computes": kernel.computes, "seen": kernel.seen}
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
    layout: str = compressed_tensors.NAME,
    overrides: Sequence[str | Override] = (),
    revision: str | None = None,
) -> CheckReport:
    """Judge a checkpoint, or what `quantize` would make of it.

    Args:
        model: A folder in Hugging Face layout, or a model of the hub, whose weights stay there.
        target: ``"vllm:h100:tp4"``, or a `Target`.
        scheme: For a model that is not quantized: what to quantize it to. Static scales are taken for granted.
        layout: With `scheme`: a name of `layouts.WRITERS`.
        overrides: With `scheme`: as in `quantize_checkpoint`.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Returns:
        The verdict, with its reasons.

    Raises:
        UsageError: The request is wrong; `scheme` names nothing.
        AlreadyQuantizedError: `scheme` for a model that is quantized.
        CheckpointError: The files are not what they claim to be.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        TensorError: Codes and scales do not belong together.
    """
    wanted = Target.parse(target) if isinstance(target, str) else target
    with open_headers(model, revision=revision) as checkpoint:
        if scheme is None:
            if overrides:
                raise UsageError("overrides go with a scheme: they change what quantize would make")
            return judge(str(model), None, Case(Subject.of_checkpoint(checkpoint), wanted))
        chosen, writer = get_scheme(scheme), get_writer(layout)
        parsed = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
        try:
            writer.check(chosen)
            plan = make_plan(checkpoint, chosen, writer, parsed)
        except (ShapeError, UsageError) as error:
            finding = Finding(
                _UNPLANNED, Verdict.REFUSED, f"minifloat quantize refuses: {error}", "", "this version", ()
            )
            return CheckReport(str(model), scheme, wanted, layout, (), (finding,))
        return judge(str(model), scheme, Case(Subject.of_plan(checkpoint, plan), wanted))


def require_loadable(checkpoint: Checkpoint, plan: Plan, target: str | Target) -> tuple[str, ...]:
    """Refuse a plan whose output would not load, or would answer wrongly.

    Returns:
        Notes on what is less than it promises there.

    Raises:
        UsageError: It would; the message names the rule, the modules and the cure.
    """
    wanted = Target.parse(target) if isinstance(target, str) else target
    return judge(
        str(checkpoint.path), plan.scheme.name, Case(Subject.of_plan(checkpoint, plan), wanted)
    ).require_loadable()


def judge(model: str, scheme: str | None, case: Case) -> CheckReport:
    """Apply the rules, and name the kernels."""
    findings = list(apply_rules(RULES, case))
    chosen = {kind: kernel_for(case, kind) for kind in case.subject.kinds}
    refused = any(finding.verdict.is_failure for finding in findings)
    unknown = [kind for kind, kernel in chosen.items() if kernel is None]
    if unknown and not refused:
        findings.append(_not_known(case, unknown))
    kernels = () if refused else tuple(_told(case, chosen))
    findings.sort(key=lambda finding: -finding.verdict.rank)
    return CheckReport(model, scheme, case.target, case.subject.layout, kernels, tuple(findings))


def _told(case: Case, chosen: Mapping[Kind, Kernel | None]) -> Iterator[tuple[Kind, Kernel]]:
    """The kernels of linears; of experts only where the row is about them."""
    linears = {weight.kind for weight in case.weights(experts=False)}
    for kind, kernel in chosen.items():
        if kernel is not None and (kind in linears or kernel.layout == gpt_oss.NAME):
            yield kind, kernel


def _not_known(case: Case, kinds: Sequence[Kind]) -> Finding:
    return Finding(
        _UNKNOWN,
        Verdict.UNKNOWN,
        f"nothing is known here of {case.target.engine} on {case.target.hardware.name} with "
        f"{' and '.join(kind.value for kind in kinds)} in layout {case.subject.layout}",
        "try it with a small model",
        ENGINES[case.target.engine],
        (),
    )
