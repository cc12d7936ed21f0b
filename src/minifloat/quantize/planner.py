"""What `quantize` is going to write: the source, its plan in a scheme, static scales, and the engines that load it.

The run and the dry run share it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.calibration.result import Calibration
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import is_hub_id, model_folder
from minifloat.checkpoint.rewrite import refuse_inside
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.deploy.check.document import MODEL
from minifloat.deploy.check.judge import (
    CheckReport,
    EngineVerdict,
    Reports,
    check_everywhere,
    engine_verdicts,
    judge,
    others_that_load,
    short_name,
    verdicts_of,
)
from minifloat.deploy.check.subject import Case, Subject
from minifloat.deploy.check.target import Target
from minifloat.errors import TensorError, UsageError, lookup
from minifloat.kernels import processors
from minifloat.model.layouts import WRITERS, choose_writer
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.decoded import DecodedCheckpoint, plain_view
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan, require_share
from minifloat.model.plan.vocabulary import vocabulary_notes, vocabulary_overrides
from minifloat.numerics.scheme import DEFAULT_SCHEME, SCHEMES, Scheme, get_scheme
from minifloat.quantize.converted import ENGINE_OF, check_schemes, check_source, schemes_in
from minifloat.quantize.nonfinite import tensors_allowed
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.provenance import describe_recipe
from minifloat.quantize.quantized_source import with_dequantized_copies
from minifloat.quantize.static_scales import ActivationReport, apply_calibration
from minifloat.quantize.stream import Caster

if TYPE_CHECKING:  # it imports torch, which only a run with data needs
    from minifloat.quantize.data import RoundedOutput

#: A model with fewer parameters is small: its scheme should be chosen with data.
_SMALL = 1_000_000_000


@dataclass(frozen=True)
class PlannedRun:
    """All that is known before the first tensor is written."""

    planner: Planner
    plan: QuantizationPlan
    calibration: Calibration | None
    activations: tuple[ActivationReport, ...]
    rounded: RoundedOutput | None  # the output tensors that were made with data; None: there are none
    engines: Reports
    verdicts: tuple[EngineVerdict, ...]
    engine_notes: tuple[str, ...]  # sentences on engines that will not load the output, for the user to read first
    report_notes: tuple[str, ...]  # sentences for the report alone: on static scales, on what else could be saved

    @property
    def checkpoint(self) -> Checkpoint:
        """The source, or the plain model that a quantized source stands for."""
        return self.planner.checkpoint

    @property
    def recipe(self) -> dict[str, Any]:
        """The arguments that determine the output, as JSON values."""
        rounding = None if self.rounded is None else self.rounded.recipe
        options = self.planner.options
        return describe_recipe(
            self.plan,
            self.calibration,
            rounding,
            from_quantized=options.from_quantized,
            allow_nonfinite=options.allow_nonfinite,
        )


@contextmanager
def planned_source(
    source: str | os.PathLike[str], destination: str | os.PathLike[str], options: QuantizeOptions
) -> Iterator[Planner]:
    """Open a source, and yield what plans its output; options that no source can have are refused before."""
    if options.layout is not None and options.layout not in ENGINE_OF:
        lookup("layout", options.layout, {**WRITERS, **ENGINE_OF})
    if options.base_model is not None and not is_hub_id(options.base_model):
        raise UsageError(f"base_model: expected the id of a model of the hub, ORG/NAME, got {options.base_model!r}")
    overrides, caster = options.parsed_overrides(), Caster.of(options.device, options.impl)
    processors.workers(options.workers)
    with Checkpoint.open(model_folder(source, revision=options.revision)) as stored:
        checkpoint = plain_view(stored) if options.from_quantized else stored
        refuse_contradictions(checkpoint.config, checkpoint.tensors, checkpoint.path)
        refuse_inside(checkpoint.path, Path(destination))
        if options.layout in ENGINE_OF:
            check_source(checkpoint, Path(destination), options)
        else:
            CheckpointWriter.check_destination(Path(destination), overwrite=options.overwrite)
        tensors_allowed(checkpoint, options.allow_nonfinite)
        overrides = [*vocabulary_overrides(checkpoint, options.lm_head, options.embedding), *overrides]
        yield Planner(stored, checkpoint, options, overrides, caster)


class Planner:
    """Plans the output of one source, and judges schemes by the engines that would load it."""

    def __init__(
        self,
        stored: Checkpoint,
        checkpoint: Checkpoint,
        options: QuantizeOptions,
        overrides: Sequence[Override],
        caster: Caster,
    ) -> None:
        self.stored, self.checkpoint, self.options, self.caster = stored, checkpoint, options, caster
        self.decoded = checkpoint if isinstance(checkpoint, DecodedCheckpoint) else None
        self.overrides = list(overrides)
        self._plans: dict[Scheme, QuantizationPlan] = {}
        self.converted_to = options.layout if options.layout in ENGINE_OF else None
        self._target = None if options.target is None else Target.parse(options.target)
        if self.converted_to is not None:
            self._target = Target.of(ENGINE_OF[self.converted_to], "cpu")

    def plan(self, scheme: Scheme, overrides: Sequence[Override]) -> QuantizationPlan:
        layout = choose_writer(None if self.converted_to else self.options.layout, self.checkpoint.config, scheme)
        if self.converted_to is not None:
            scheme, overrides = schemes_in(self.converted_to, scheme, overrides)
        plan = make_plan(self.checkpoint, scheme, layout, overrides, mtp=self.options.mtp)
        if not self.options.allow_partial:
            require_share(plan)
        if self.converted_to is not None:
            schemes = dict.fromkeys(plan.modules.values())
            check_schemes(self.converted_to, schemes, within_budget=self.options.budget is not None)
            if self._target is not None:
                self._report(plan, self._target).require_loadable()
        return plan if self.decoded is None else with_dequantized_copies(plan, self.decoded)

    def with_overrides(self, overrides: Sequence[Override]) -> Planner:
        """Return the planner of the same source with other overrides."""
        return Planner(self.stored, self.checkpoint, self.options, overrides, self.caster)

    def chosen(self, scheme: Scheme | None) -> tuple[QuantizationPlan, tuple[str, ...]]:
        """Return the plan of a scheme; None: of the default one, or of one that loads, with a note on that choice."""
        notes: tuple[str, ...] = ()
        if scheme is None and self.converted_to is not None:
            raise UsageError(f"--layout {self.converted_to}: give a --scheme whose codes it holds, e.g. mxfp4")
        if scheme is None:
            scheme, notes = self._default(get_scheme(DEFAULT_SCHEME))
        plan = self._plan(scheme)
        self.caster.require(dict.fromkeys([plan.scheme, *plan.modules.values()]))
        return plan, notes

    def unmeasured(self, scheme: Scheme | None, plan: QuantizationPlan) -> tuple[str, ...]:
        """Return what is known of a small model whose default scheme rounds inputs without data; else nothing."""
        if scheme is not None or plan.scheme.activation is None or _parameters(plan) >= _SMALL:
            return ()
        return (
            f"Nothing was measured on this model. {plan.scheme.name} rounds inputs to E4M3, which costs models of less "
            "than 1 billion parameters more than others, and may cost more than compare allows: SmolLM2-135M fails "
            "(KL 0.028, perplexity +3%). With --data self, quantize measures it and keeps inputs in 16 bits where "
            "that is needed; --scheme fp8 keeps them all in 16 bits.",
        )

    def run(
        self,
        plan: QuantizationPlan,
        notes: Sequence[str] = (),
        calibration: Calibration | None = None,
        rounded: RoundedOutput | None = None,
        *,
        calibrates: bool = False,
    ) -> PlannedRun:
        """Return the run that writes a plan; with `calibrates` without the static scales, which do not exist yet."""
        activations: tuple[ActivationReport, ...] = ()
        scale_notes: tuple[str, ...] = ()
        if calibration is not None or not calibrates:
            plan, activations, scale_notes = apply_calibration(
                plan, self.checkpoint, calibration, kv_cache=self.options.kv_cache
            )
        engines = check_everywhere(self._subject(plan), MODEL)
        if self.converted_to is not None:
            engines = {engine: engines[engine] for engine in (ENGINE_OF[self.converted_to],)}
        verdicts = engine_verdicts(engines)
        engine_notes = (*notes, *self._notes(plan, verdicts))
        report_notes = (*scale_notes, *(vocabulary_notes(plan) if self.converted_to is None else ()))
        return PlannedRun(self, plan, calibration, activations, rounded, engines, verdicts, engine_notes, report_notes)

    def _plan(self, scheme: Scheme) -> QuantizationPlan:
        """Return the plan of a scheme with the overrides of the run, made once."""
        if scheme not in self._plans:
            self._plans[scheme] = self.plan(scheme, self.overrides)
        return self._plans[scheme]

    def _default(self, scheme: Scheme) -> tuple[Scheme, tuple[str, ...]]:
        """Return the default scheme, or one that loads where the default does not, with a note on that choice."""
        plan = self._plan(scheme)
        if self.loads(plan):
            return scheme, ()
        other = self._alternative(scheme)
        if other is None:
            return scheme, ()
        why = self._why_not(plan)
        return other, (
            f"The scheme is {other.name}, which loads {self._names(other)}: of this model the default {scheme.name} "
            f"loads {self._nowhere} ({why}). --scheme {scheme.name} chooses it nevertheless.",
        )

    def _notes(self, plan: QuantizationPlan, verdicts: tuple[EngineVerdict, ...]) -> Iterator[str]:
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

    def _subject(self, plan: QuantizationPlan) -> Subject:
        subject = Subject.of_plan(self.checkpoint, plan)
        return subject if self.converted_to is None else replace(subject, layout=self.converted_to)

    def disk_bytes(self, plan: QuantizationPlan) -> int:
        """Return the bytes of the output, and of the checkpoint that it is converted from."""
        return plan.output_bytes * (1 if self.converted_to is None else 2)

    def _report(self, plan: QuantizationPlan, target: Target) -> CheckReport:
        return judge(str(self.checkpoint.path), plan.scheme.name, Case(self._subject(plan), target))

    def _verdicts(self, plan: QuantizationPlan) -> tuple[EngineVerdict, ...]:
        return verdicts_of(self._subject(plan))

    def loads(self, plan: QuantizationPlan) -> bool:
        """Return whether the target, or any engine but minifloat, loads a plan."""
        if self._target is not None:
            return not self._report(plan, self._target).failures
        return bool(others_that_load(self._verdicts(plan)))

    def _why_not(self, plan: QuantizationPlan) -> str:
        if self._target is not None:
            return next(finding.problem for finding in self._report(plan, self._target).failures)
        verdict = next(verdict for verdict in self._verdicts(plan) if verdict.problem)
        return f"{short_name(verdict.engine)}: {verdict.problem}"

    def _alternative(self, scheme: Scheme) -> Scheme | None:
        """Return the scheme of the same elements that most engines load, or that the target loads; None: none."""
        best, most = None, 0
        for other in _candidates(scheme):
            try:
                plan = self._plan(other)
            except (TensorError, UsageError):
                continue
            if self._target is not None:
                if self.loads(plan):
                    return other
                continue
            count = len(others_that_load(self._verdicts(plan)))
            if count > most:
                best, most = other, count
        return best

    def _names(self, scheme: Scheme) -> str:
        if self._target is not None:
            return f"on {self._target}"
        verdicts = self._verdicts(self._plan(scheme))
        return f"in {', '.join(short_name(engine) for engine in others_that_load(verdicts))}"

    def _advice(self, other: Scheme | None) -> str:
        if other is None:
            return ", and no other scheme with these elements does better"
        return f"; --scheme {other.name} loads {self._names(other)}"


def _parameters(plan: QuantizationPlan) -> int:
    return sum(math.prod(tensor.source.shape) for tensor in plan.tensors)


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
