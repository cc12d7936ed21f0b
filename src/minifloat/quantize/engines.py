"""What engines make of a scheme, decided before anything is written: a default that loads, and sentences for the user.

`quantize` does not refuse a scheme that only minifloat loads. It says so first, and names a scheme that others load. A
scheme that the caller did not choose is replaced by that one. Only headers are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check.engine_verdict import EngineVerdict, others_that_load, short_name, verdicts_of
from minifloat.deploy.check.judge import CheckReport, judge
from minifloat.deploy.check.subject import Case, Subject
from minifloat.deploy.check.target import Target
from minifloat.errors import TensorError, UsageError
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import SCHEMES, Scheme

Planner = Callable[[Scheme, Sequence[Override]], QuantizationPlan]


class EngineChoice:
    """Judges schemes of one run of `quantize` by the engines that would load the output."""

    def __init__(
        self, checkpoint: Checkpoint, planner: Planner, overrides: Sequence[Override], target: str | None
    ) -> None:
        self._checkpoint, self._planner, self._overrides = checkpoint, planner, overrides
        self._plans: dict[Scheme, QuantizationPlan] = {}
        self._target = None if target is None else Target.parse(target)

    def plan(self, scheme: Scheme) -> QuantizationPlan:
        """Return the plan of a scheme with the overrides of the run, made once."""
        if scheme not in self._plans:
            self._plans[scheme] = self._planner(scheme, self._overrides)
        return self._plans[scheme]

    def default(self, scheme: Scheme) -> tuple[Scheme, tuple[str, ...]]:
        """Return the default scheme, or one that loads where the default does not, with a note on that choice."""
        plan = self.plan(scheme)
        if self._loads(plan):
            return scheme, ()
        other = self._alternative(scheme)
        if other is None:
            return scheme, ()
        why = self._why_not(plan)
        return other, (
            f"The scheme is {other.name}, which loads {self._names(other)}: of this model the default {scheme.name} "
            f"loads {self._nowhere} ({why}). --scheme {scheme.name} chooses it nevertheless.",
        )

    def notes(self, plan: QuantizationPlan, verdicts: tuple[EngineVerdict, ...]) -> Iterator[str]:
        """Yield a note on a plan that only minifloat loads, and one on the target."""
        if self._target is not None:
            report = self._report(plan, self._target)
            try:
                degradations = report.require_loadable()
            except UsageError as error:
                other = self._alternative(plan.scheme)
                raise UsageError(f"{error}{self._advice(other)}") from None
            computes = "; ".join(f"{kind.value} with {kernel.name}" for kind, kernel in report.kernels)
            yield f"{self._target}: {report.verdict.value} as {plan.scheme.name}{f' ({computes})' if computes else ''}."
            yield from degradations
        elif plan.modules and not others_that_load(verdicts):
            yield (
                f"No engine but minifloat loads {plan.scheme.name} of this model ({self._why_not(plan)})"
                f"{self._advice(self._alternative(plan.scheme))}."
            )

    @property
    def _nowhere(self) -> str:
        return "in no engine but minifloat" if self._target is None else f"not on {self._target}"

    def _report(self, plan: QuantizationPlan, target: Target) -> CheckReport:
        subject = Subject.of_plan(self._checkpoint, plan)
        return judge(str(self._checkpoint.path), plan.scheme.name, Case(subject, target))

    def _verdicts(self, plan: QuantizationPlan) -> tuple[EngineVerdict, ...]:
        return verdicts_of(Subject.of_plan(self._checkpoint, plan))

    def _loads(self, plan: QuantizationPlan) -> bool:
        if self._target is not None:
            return not self._report(plan, self._target).failures
        return bool(others_that_load(self._verdicts(plan)))

    def _why_not(self, plan: QuantizationPlan) -> str:
        if self._target is not None:
            return next(finding.problem for finding in self._report(plan, self._target).failures)
        verdict = next(verdict for verdict in self._verdicts(plan) if verdict.problem)
        return f"{short_name(verdict.engine)}: {verdict.problem}"

    def _alternative(self, scheme: Scheme) -> Scheme | None:
        """Return the scheme of the same elements that most engines load, or that the target loads; None: none.

        Schemes that need calibration are left out. Those that quantize inputs as `scheme` does come first.
        """
        best, most = None, 0
        for other in _candidates(scheme):
            try:
                plan = self.plan(other)
            except (TensorError, UsageError):
                continue
            if self._target is not None:
                if self._loads(plan):
                    return other
                continue
            count = len(others_that_load(self._verdicts(plan)))
            if count > most:
                best, most = other, count
        return best

    def _names(self, scheme: Scheme) -> str:
        if self._target is not None:
            return f"on {self._target}"
        verdicts = self._verdicts(self.plan(scheme))
        return f"in {', '.join(short_name(engine) for engine in others_that_load(verdicts))}"

    def _advice(self, other: Scheme | None) -> str:
        if other is None:
            return ", and no other scheme with these elements does better"
        return f"; --scheme {other.name} loads {self._names(other)}"


def _candidates(scheme: Scheme) -> list[Scheme]:
    """Return the other schemes with the same elements and without calibrated scales, those like `scheme` first."""
    others = [
        other
        for other in SCHEMES.values()
        if other != scheme
        and other.weight.element is scheme.weight.element
        and (other.activation is None or not other.activation.needs_calibration)
    ]
    inputs = None if scheme.activation is None else scheme.activation.element
    return sorted(others, key=lambda other: (None if other.activation is None else other.activation.element) != inputs)
