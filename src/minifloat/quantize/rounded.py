"""The codes of a checkpoint that are chosen with data: from the options of `quantize` to the run of `rounding`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from minifloat.calibration.data import CalibrationSet
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.amount import require_tokens, widest
from minifloat.quantize.cost import WORK_SUFFIX, beside, cost_of
from minifloat.quantize.data import DataOptions, RoundedOutput, source_gains, source_warnings
from minifloat.quantize.estimate import Search
from minifloat.quantize.options import Budget
from minifloat.quantize.own_text import prepare_texts
from minifloat.quantize.planner import PlannedRun, Planner
from minifloat.quantize.rounding.budget import budget_search, require_feasible, round_within_budget
from minifloat.quantize.rounding.budget_formats import find_formats, loads_alike
from minifloat.quantize.rounding.input_choice import ATTEMPTS, chooses_inputs, input_choice, inputs_search
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.texts import SplitText


@contextmanager
def run_with_data(
    planner: Planner, scheme: Scheme | None, data: DataOptions, destination: Path, progress: Progress | None
) -> Iterator[PlannedRun]:
    """Choose codes with data, and formats too within a budget, and yield the run that writes them."""
    if (budget := planner.options.budget) is None:
        plan, notes = planner.chosen(scheme)
        if chooses_inputs(scheme, plan):
            with default_output(planner, plan, data, destination, progress) as (planner, plan, rounded):
                yield planner.run(plan, notes, rounded.calibration(planner.checkpoint), rounded)
            return
        with rounded_output(planner.checkpoint, plan, data, destination, progress) as rounded:
            yield planner.run(plan, notes, rounded.calibration(planner.checkpoint), rounded)
        return
    with budgeted_output(planner, scheme, budget, data, destination, progress) as rounded:
        planner = planner.with_overrides(rounded.overrides)
        yield planner.run(*planner.chosen(rounded.scheme), rounded.calibration(planner.checkpoint), rounded)


@contextmanager
def rounded_output(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions,
    destination: Path,
    progress: Progress | None,
) -> Iterator[RoundedOutput]:
    """Choose the codes of a plan with data; the work is kept if the block is left with an error."""
    work_dir = beside(destination, WORK_SUFFIX)
    texts, record = _texts(checkpoint, plan, data, destination, progress)
    with round_checkpoint(checkpoint, plan, texts, data.rounding, work_dir, progress) as model:
        gains = source_gains(record, texts.reported, data.text.held_out, model.held_out)
        notes = (*_notes(model, plan, data), *source_warnings(gains, data.rounding.method.name))
        yield RoundedOutput(model, _recipe(data, record, texts.kept), notes, by_source=gains)


@contextmanager
def default_output(
    planner: Planner, plan: QuantizationPlan, data: DataOptions, destination: Path, progress: Progress | None
) -> Iterator[tuple[Planner, QuantizationPlan, RoundedOutput]]:
    """Choose which inputs the default scheme rounds, and codes; the work is kept if the block is left with an error."""
    checkpoint, work_dir = planner.checkpoint, beside(destination, WORK_SUFFIX)
    search = inputs_search(plan, checkpoint.config)
    texts, record = _texts(checkpoint, plan, data, destination, progress, search)
    with ExitStack() as stack:
        moments = stack.enter_context(OutputMoments(work_dir))
        measured = input_choice(checkpoint, plan, texts, data.rounding, work_dir, moments, progress)
        choice = stack.enter_context(measured)
        for attempt in range(ATTEMPTS):
            choice.choose(partial(_loads, planner, plan), last=attempt == ATTEMPTS - 1)
            scheme, overrides = choice.recipe()
            planner = planner.with_overrides(overrides)
            plan, _ = planner.chosen(scheme)
            folder = work_dir.with_name(f"{work_dir.name}-{attempt}") if attempt else work_dir
            run = round_checkpoint(checkpoint, plan, texts, data.rounding, folder, progress, moments=moments)
            model = stack.enter_context(run)
            if choice.accepts(model.choosing["method"], model.choosing["disagreement"]):
                break
        gains = source_gains(record, texts.reported, data.text.held_out, model.held_out)
        warnings = source_warnings(gains, data.rounding.method.name)
        notes = (*choice.notes(), *_notes(model, plan, data), *warnings)
        yield planner, plan, RoundedOutput(model, _recipe(data, record, texts.kept), notes, None, gains, choice)


def _loads(planner: Planner, plan: QuantizationPlan, scheme: Scheme, overrides: Sequence[Override]) -> bool:
    """Return whether a mixture loads wherever a plan does, or another scheme in any engine or on the target."""
    try:
        other = planner.plan(scheme, overrides)
    except UsageError:
        return False
    if scheme != plan.scheme:
        return planner.loads(other)
    return loads_alike(planner.checkpoint, planner.options.target, plan)(other)


@contextmanager
def budgeted_output(
    planner: Planner,
    scheme: Scheme | None,
    budget: Budget,
    data: DataOptions,
    destination: Path,
    progress: Progress | None,
) -> Iterator[RoundedOutput]:
    """Choose formats within a budget, and codes in them; the work is kept if the block is left with an error."""
    checkpoint, overrides = planner.checkpoint, planner.overrides
    formats = find_formats(checkpoint, planner.plan, scheme, overrides, planner.options.target)
    require_feasible(budget, formats.groups)
    plan = planner.plan(formats.scheme, overrides)
    search = budget_search(formats, plan, budget, checkpoint.config)
    texts, record = _texts(checkpoint, plan, data, destination, progress, search)
    with round_within_budget(
        checkpoint,
        budget,
        formats,
        texts,
        data.rounding,
        beside(destination, WORK_SUFFIX),
        progress,
    ) as within:
        gains = source_gains(record, texts.reported, data.text.held_out, within.model.held_out)
        warnings = source_warnings(gains, data.rounding.method.name)
        notes = (*within.notes(), *_notes(within.model, within.plan, data), *warnings)
        yield RoundedOutput(within.model, _recipe(data, record, texts.kept), notes, within, gains)


def _recipe(data: DataOptions, record: dict[str, Any], kept: CalibrationSet) -> dict[str, Any]:
    return {**data.rounding.to_dict(), "data": record, "tokens": kept.tokens}


def _texts(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions,
    destination: Path,
    progress: Progress | None,
    search: Search | None = None,
) -> tuple[SplitText, dict[str, Any]]:
    text, file, cost = cost_of(checkpoint, plan, data, destination, search)
    cost.require()
    if data.announce is not None:
        data.announce(cost.text())
    texts = prepare_texts(checkpoint, data.sources, text, file, device=data.rounding.device, progress=progress)
    parts = SplitText.of(texts, text.held_out)
    require_tokens(parts.kept.tokens, widest(plan))
    return parts, dict(texts.record)


def _notes(model: RoundedModel, plan: QuantizationPlan, data: DataOptions) -> tuple[str, ...]:
    """Return what the user must know: the gain, weights that were not rounded with data, and text that is far off."""
    found, name = model.held_out, data.rounding.method.name
    notes = []
    missed = [module for module in plan.modules if module not in model.weights]
    if missed:
        notes.append(
            f"{len(missed)} of {len(plan.modules)} weights were rounded to nearest, because the text does not reach "
            f"them layer by layer: {', '.join(missed[:3])}{' ...' if len(missed) > 3 else ''}."
        )
    kept = [row["module"] for row in model.weights.values() if row["method"] != name]
    if kept:
        notes.append(
            f"{len(kept)} weights keep rounding to nearest, which loses less on held-out text: {', '.join(kept[:3])}"
            f"{' ...' if len(kept) > 3 else ''}."
        )
    if found["method"] > found["nearest"]:
        notes.append(
            f"WARNING: {name} is worse than rounding to nearest on held-out text ({found['method']:.4f} against "
            f"{found['nearest']:.4f}); give more text, or text of the kind that the model will see."
        )
    return tuple(notes)
