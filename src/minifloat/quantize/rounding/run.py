"""`round_checkpoint` and `round_saved`: choose the codes of all weights of a plan with text, or with stored Hessians.

Stored Hessians need neither text nor forward passes, and give the codes that the text gives which they come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import layers_required
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.walk import LayerWork
from minifloat.calibration.model import CalibrationModel, check_data
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.errors import StatsError, UsageError
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.model.runtime.load import Loader
from minifloat.quantize.rounding.folding import powers_of_two
from minifloat.quantize.rounding.group_damage import DamageRequest, Damages
from minifloat.quantize.rounding.layer import LayerRounding, PlannedWeights
from minifloat.quantize.rounding.layer_fold import LayerFold
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT, RoundedModel, layer_content
from minifloat.quantize.rounding.saved import SavedHessians, SavedLayer
from minifloat.quantize.rounding.stage_inputs import InputQuantizer
from minifloat.quantize.rounding.statistics import Rows, Statistics, filled_up, mean_hessian
from minifloat.quantize.rounding.texts import SplitText
from minifloat.quantize.rounding.walk import RoundingWalk


@contextmanager
def round_checkpoint(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    texts: SplitText,
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
    moments: OutputMoments | None = None,
) -> Iterator[RoundedModel]:
    """Choose the codes of all weights of a plan; the files stay until the block is left without an error.

    Several runs with one text may share the moments of outputs.
    """
    with _stack(checkpoint, texts, options) as (loader, stack):
        parts = [texts.first_chosen_on, texts.first_reported]
        fingerprint = run_fingerprint(loader, CalibrationSet(texts.sequences), _facts(options, plan), parts)
        own = OutputMoments(work_dir) if moments is None else nullcontext(moments)
        with LayerWork(work_dir, fingerprint, LAYER_FORMAT) as folder, own as moments:
            if options.method.weighs_outputs and len(folder.finished) <= len(stack):
                moments.take(stack, texts.kept.sequences, run_fingerprint(loader, texts.kept, "moments"), progress)
            walk = RoundingWalk(stack, plan, texts, options, checkpoint.config, moments, progress)
            walk.run(folder)
            yield RoundedModel(folder.finished)
            folder.remove()


def measure_damage(
    checkpoint: Checkpoint,
    request: DamageRequest,
    texts: SplitText,
    options: RoundingOptions,
    moments: OutputMoments,
    progress: Progress | None = None,
) -> Damages:
    """Return the damage of changes to groups of modules, and keep the moments of outputs for the runs that follow."""
    with _stack(checkpoint, texts, options) as (loader, stack):
        fingerprint = run_fingerprint(loader, texts.kept, "moments", request.to_dict())
        moments.take(stack, texts.kept.sequences, fingerprint, progress, request)
    return moments.damages


@contextmanager
def _stack(checkpoint: Checkpoint, texts: SplitText, options: RoundingOptions) -> Iterator[tuple[Loader, LayerStack]]:
    """Open the layers of a model that a text suits."""
    with layers_required(checkpoint, "quantize it without data"):
        model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
        loader = model.loader()
        check_data(loader.model, texts.kept, texts.choosing, texts.reported)
        yield loader, LayerStack(model, loader, options.max_memory)


def _facts(options: RoundingOptions, plan: QuantizationPlan) -> dict[str, Any]:
    """Return what determines the codes besides model and data, as JSON values."""
    schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
    return {**options.to_dict(), "layout": plan.layout.name, "modules": schemes}


def require_independent(options: RoundingOptions) -> None:
    """Raise an error if a method takes more than the inputs of the original model."""
    name = options.method.name
    if options.method.follows_quantized:
        raise UsageError(
            f"the method {name} cannot use stored Hessians: it looks at the inputs that the quantized layers give, "
            "which differ from scheme to scheme; use --method gptq with --stats, or give the text with --data"
        )
    if options.kv_cache:
        raise UsageError(
            "scales of the KV cache come from the keys and values of the quantized model, which needs text: give "
            "--data DATA instead of --stats"
        )


@contextmanager
def round_saved(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    saved: SavedHessians,
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
) -> Iterator[RoundedModel]:
    """Choose the codes of all weights of a plan; the files stay until the block is left without an error."""
    require_independent(options)
    saved.model.require(checkpoint, f"Hessians in {saved.folder}")
    with layers_required(checkpoint, "quantize it without --stats"):
        model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
        loader = model.loader()
        stack = LayerStack(model, loader, options.max_memory)
        if len(saved.layers) != len(stack):
            raise StatsError(
                saved.folder,
                f"expected the Hessians of {len(stack)} layers, found {len(saved.layers)}; calibrate again",
            )
        fingerprint = run_fingerprint(loader, CalibrationSet(()), _facts(options, plan) | {"hessians": saved.layers})
        with LayerWork(work_dir, fingerprint, LAYER_FORMAT) as folder:
            walk = _SavedWalk(stack, plan, saved, options, checkpoint.config, progress)
            for index in range(len(folder.finished), len(stack)):
                folder.finish(index, walk.layer(index))
            if len(folder.finished) == len(stack):
                folder.finish(len(stack), layer_content({}, {"held_out": None}))
            yield RoundedModel(folder.finished)
            folder.remove()


class _SavedWalk:
    """One run over the weights of all layers."""

    def __init__(
        self,
        stack: LayerStack,
        plan: QuantizationPlan,
        saved: SavedHessians,
        options: RoundingOptions,
        config: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self.stack, self.saved, self.progress = stack, saved, progress
        self.weights = PlannedWeights(plan, config, options.method, options.fold)

    @torch.inference_mode()
    def layer(self, index: int) -> ArrayContent:
        """Round the weights of one layer, and return its codes."""
        saved = self.saved.layer(index)
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as in the whole model
                stack.enter_context(self.stack.weights.layer(index))
            views = self.weights.views(self.stack, index)
            rounding = self.weights.rounding(views, saved.stages)
            inputs = InputQuantizer(self.stack.model, saved.stages, rounding.parts)
            for number, stage in enumerate(saved.stages):
                for expert in range(len(stage.experts)):
                    if (largest := saved.largest(number, expert)) is not None:
                        inputs.add(number, expert, largest, saved.tokens[number][expert])
            fold = self.weights.fold(index, views, saved.stages, saved.fold_sample)
            inputs.fold(fold.by_expert)
            rounding.measure()
            for number in range(len(saved.stages)):
                self._round_stage(number, saved, rounding, fold)
                if self.progress is not None:
                    count, layers = len(saved.stages), len(self.stack)
                    what = f"layer {index + 1} of {layers}, {saved.stages[number].name}"
                    self.progress(index * count + number + 1, count * layers, what)
            return self.weights.result(rounding, fold, inputs=inputs.rows())

    def _round_stage(self, number: int, saved: SavedLayer, rounding: LayerRounding, fold: LayerFold) -> None:
        """Round the weights that read the inputs of a stage."""
        stage, tokens = saved.stages[number], saved.tokens[number]
        if not any(module in rounding.parts for expert in stage.experts for module in expert):
            return

        def statistics(expert: int) -> Statistics:
            hessian = saved.hessian(number, expert)
            if (factors := _factors(fold, number, expert)) is not None:
                hessian = hessian.mul_(factors[:, None]).mul_(factors)
            return Statistics(hessian, tokens=tokens[expert])

        mean = cache(lambda: mean_hessian(map(statistics, range(len(stage.experts))), stage.width))
        for expert, modules in enumerate(stage.experts):
            own, facts = statistics(expert), {"tokens": tokens[expert]}
            if stage.outer is not None:
                own, facts = filled_up(own, stage.width, mean)
            rounding.round_group(modules, own, _held_out(saved, fold, number, expert), facts)


def _held_out(saved: SavedLayer, fold: LayerFold, number: int, expert: int) -> Rows | None:
    """Return the held-out inputs of a expert as they are after the folds."""
    rows = saved.held_out(number, expert)
    if rows is None:
        return None
    factors = _factors(fold, number, expert)
    rows = rows if factors is None else rows * factors
    return Rows(rows, rows)


def _factors(fold: LayerFold, number: int, expert: int) -> Tensor | None:
    """Return what the inputs of a expert are multiplied by after the folds, powers of two, float32 ``[K]``."""
    exponents = fold.exponents_of(number, expert)
    return None if exponents is None else powers_of_two(-exponents)
