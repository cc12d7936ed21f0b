"""The codes of a checkpoint that are chosen with data: from the options of `quantize` to the run of `rounding`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minifloat.calibration.data import CalibrationSet, Source, SourceLike
from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.options import TextOptions
from minifloat.calibration.own_text import WriteCopy
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import DEFAULT_RULE
from minifloat.calibration.session import load_texts
from minifloat.calibration.stats import ActivationStats, KVStats, ModuleStats
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import DataError, UsageError
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.rounding.budget.formats import Planner, find_formats
from minifloat.quantize.rounding.budget.search import WithinBudget, require_feasible, round_within_budget
from minifloat.quantize.rounding.budget.target import Budget
from minifloat.quantize.rounding.collect import TOKENS_PER_CHANNEL
from minifloat.quantize.rounding.methods import get_method
from minifloat.quantize.rounding.options import DEFAULT_ROUNDING, RoundingOptions
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.saved import SavedHessians
from minifloat.quantize.rounding.saved_run import require_independent, round_saved
from minifloat.quantize.source_gain import SourceGain, source_gains, source_warnings

#: Suffix of the folder beside the destination in which finished layers are kept.
WORK_SUFFIX = ".minifloat-rounding"
#: Text that rounding takes by default: 64 Ki tokens, and a tenth more that is held out.
DEFAULT_TEXT = TextOptions(samples=284, seq_len=256, held_out=0.1)


@dataclass(frozen=True)
class DataOptions:
    """Text or stored Hessians, and how codes are chosen with them.

    Attributes:
        sources: Files, folders or data sets, or ``"self"`` for text that the model itself writes.
        text: How text becomes sequences. The held-out part must not be empty.
        rounding: Method, folding, device.
        hessians: A folder that ``minifloat calibrate --hessians`` wrote, which replaces the text; needs the method
            ``"gptq"``.
    """

    sources: Sequence[SourceLike] = ()
    text: TextOptions = DEFAULT_TEXT
    rounding: RoundingOptions = DEFAULT_ROUNDING
    hessians: Path | None = None

    @classmethod
    def of(cls, data: DataOptions | SourceLike | Sequence[SourceLike] | None, method: str | None) -> DataOptions | None:
        """Return the options that the arguments `data` and `method` of `quantize_checkpoint` stand for.

        Raises:
            UnknownNameError: There is no such method.
            UsageError: The method needs data and there is none, or `data` names a method itself.
        """
        chosen = None if method is None else get_method(method)
        if isinstance(data, DataOptions):
            if chosen is not None:
                raise UsageError("give the method either in `data` or as `method`, not in both")
            return data
        if data is None or (not isinstance(data, str | os.PathLike | Source) and not data):
            if chosen is not None and chosen.needs_data:
                raise UsageError(
                    f"the method {chosen.name} needs text: give --data FILE, or --data self for text that the model "
                    "writes itself"
                )
            return None
        sources = [data] if isinstance(data, str | os.PathLike | Source) else list(data)
        return cls(sources, rounding=DEFAULT_ROUNDING if chosen is None else RoundingOptions(method=chosen))


@dataclass(frozen=True)
class RoundedOutput:
    """The output tensors that were made with data."""

    model: RoundedModel
    recipe: dict[str, Any]
    notes: tuple[str, ...]
    within: WithinBudget | None = None
    by_source: tuple[SourceGain, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """The scheme of most weights, as a budget chose it."""
        assert self.within is not None
        return self.within.plan.scheme

    @property
    def overrides(self) -> list[Override]:
        """The overrides for all other weights, as a budget chose them."""
        assert self.within is not None
        return list(self.within.plan.overrides)

    def calibration(self, checkpoint: Checkpoint) -> Calibration | None:
        """Return the ranges of inputs, keys and values as calibration by the rule ``max``; None if none were recorded.

        The whole text counts as one sequence.
        """
        if not self.model.inputs and not self.model.kv:
            return None
        inputs = {
            row["module"]: ModuleStats(
                np.array([row["amax"] if row["tokens"] else 0.0], np.float32), np.array([row["tokens"]], np.int64)
            )
            for row in self.model.inputs
        }
        kv = {
            row["module"]: KVStats(np.array([row["k"]], np.float32), np.array([row["v"]], np.float32))
            for row in self.model.kv
        }
        tokens = int(self.recipe["tokens"])
        stats = ActivationStats(ModelIdentity.of(checkpoint), 1, tokens, self.recipe["data"], inputs, kv)
        return Calibration(stats, DEFAULT_RULE)

    def to_dict(self) -> dict[str, Any]:
        """Return method, text and errors as JSON values."""
        weights = [{key: value for key, value in row.items() if key != "stats"} for row in self.model.weights.values()]
        tuned = {} if self.model.tuning is None else {"tuned": self.model.tuning}
        budget = {} if self.within is None else {"budget": self.within.to_dict()}
        held_out = {
            **self.model.held_out,
            **({"by_source": [asdict(g) for g in self.by_source]} if self.by_source else {}),
        }
        rest = {"held_out": held_out, "folds": self.model.folds, "weights": weights}
        return {**self.recipe, **budget, **tuned, **rest}


@contextmanager
def rounded_output(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions,
    destination: Path,
    write_copy: WriteCopy,
    progress: Progress | None,
) -> Iterator[RoundedOutput]:
    """Choose the codes of a plan with data; the work is kept if the block is left with an error."""
    work_dir = _beside(destination, WORK_SUFFIX)
    if data.hessians is not None:
        if data.sources:
            raise UsageError("give text (--data) or stored Hessians (--stats), not both")
        require_independent(data.rounding)
        saved = SavedHessians.load(data.hessians)
        recipe = {**data.rounding.to_dict(), "data": dict(saved.data), "tokens": saved.tokens, "stored_hessians": True}
        with round_saved(checkpoint, plan, saved, data.rounding, work_dir, progress) as model:
            yield RoundedOutput(model, recipe, _notes(model, plan, data))
        return
    kept, held_out, record = _texts(checkpoint, plan, data, destination, write_copy, progress)
    with round_checkpoint(checkpoint, plan, kept, held_out, data.rounding, work_dir, progress) as model:
        gains = source_gains(record, held_out, data.text.held_out, model.held_out)
        notes = (*_notes(model, plan, data), *source_warnings(gains, data.rounding.method.name))
        yield RoundedOutput(model, _recipe(data, record, kept), notes, by_source=gains)


@contextmanager
def budgeted_output(
    checkpoint: Checkpoint,
    planner: Planner,
    scheme: Scheme | None,
    overrides: Sequence[Override],
    budget: Budget,
    data: DataOptions,
    destination: Path,
    target: str | None,
    write_copy: WriteCopy,
    progress: Progress | None,
) -> Iterator[RoundedOutput]:
    """Choose formats within a budget, and codes in them; the work is kept if the block is left with an error."""
    if data.hessians is not None:
        raise UsageError("a budget measures damage with text: give --data instead of --stats")
    formats = find_formats(checkpoint, planner, scheme, overrides, target)
    require_feasible(budget, formats.groups)
    plan = planner(formats.scheme, overrides)
    kept, held_out, record = _texts(checkpoint, plan, data, destination, write_copy, progress)
    with round_within_budget(
        checkpoint,
        planner,
        budget,
        formats,
        overrides,
        kept,
        held_out,
        data.rounding,
        _beside(destination, WORK_SUFFIX),
        progress,
    ) as within:
        gains = source_gains(record, held_out, data.text.held_out, within.model.held_out)
        warnings = source_warnings(gains, data.rounding.method.name)
        notes = (*within.notes(), *_notes(within.model, within.plan, data), *warnings)
        yield RoundedOutput(within.model, _recipe(data, record, kept), notes, within, gains)


def _beside(destination: Path, suffix: str) -> Path:
    """Return the path beside the output folder that has its name and a suffix."""
    return destination.absolute().with_name(destination.absolute().name + suffix)


def _recipe(data: DataOptions, record: dict[str, Any], kept: CalibrationSet) -> dict[str, Any]:
    return {**data.rounding.to_dict(), "data": record, "tokens": kept.tokens}


def _texts(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions,
    destination: Path,
    write_copy: WriteCopy,
    progress: Progress | None,
) -> tuple[CalibrationSet, CalibrationSet, dict[str, Any]]:
    """Return the text for statistics, the held-out text, and the record of both."""
    texts = load_texts(
        checkpoint,
        data.sources,
        data.text,
        own_text_file=destination.absolute().with_name(f"{checkpoint.path.name}.self-text.safetensors"),
        write_copy=write_copy,
        device=data.rounding.device,
        progress=progress,
    )
    return *_split(texts, data.text, plan), dict(texts.record)


def _split(texts: CalibrationSet, text: TextOptions, plan: QuantizationPlan) -> tuple[CalibrationSet, CalibrationSet]:
    """Return the text for statistics, and the held-out text."""
    if not text.held_out:
        raise DataError("a method that chooses codes with data needs held-out text to be judged on")
    kept, held_out = texts.held_out(text.held_out)
    widest = max((part.shape[1] for tensor in plan.tensors for part in tensor.parts), default=0)
    needed = TOKENS_PER_CHANNEL * widest
    if kept.tokens < needed:
        raise DataError(
            f"{kept.tokens:,} tokens of calibration text are too few for linears with {widest:,} input channels: "
            f"give at least {needed:,} (--calibration-samples, --calibration-seq-len, or more text)"
        )
    return kept, held_out


def _notes(model: RoundedModel, plan: QuantizationPlan, data: DataOptions) -> tuple[str, ...]:
    """Return what the user must know: the gain, weights that were not rounded with data, and text that is far off."""
    found, name = model.held_out, data.rounding.method.name
    notes = []
    if not found:
        notes.append(
            f"Codes were chosen with the Hessians in {data.hessians}. The KL from the original model was not measured, "
            "because that needs text: run `minifloat compare`."
        )
    if model.tuning is not None:
        notes.append(_tuning_note(model.tuning))
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
    if found and found["method"] > found["nearest"]:
        notes.append(
            f"WARNING: {name} is worse than rounding to nearest on held-out text ({found['method']:.4f} against "
            f"{found['nearest']:.4f}); give more text, or text of the kind that the model will see."
        )
    return tuple(notes)


def _tuning_note(tuned: Mapping[str, Any]) -> str:
    """Return what tuning did."""
    if tuned["best_step"] == 0:
        return f"Tuning kept the state before its first step: no later one of {tuned['steps']} steps was better."
    stopped = f" Tuning ended early: {tuned['stopped']}." if tuned["stopped"] else ""
    return (
        f"Tuning: KL {tuned['before']:.4f} -> {tuned['after']:.4f} nats on held-out text with the state after step "
        f"{tuned['best_step']} of {tuned['steps']}, which differs from match in {tuned['changed']:.1%} of the "
        f"codes.{stopped}"
    )
