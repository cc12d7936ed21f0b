"""`round_saved`: choose the codes of all weights of a plan with stored Hessians, without text and forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.errors import StatsError, UsageError
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.quantize.rounding.fold_loss import powers_of_two
from minifloat.quantize.rounding.inputs import LayerInputs
from minifloat.quantize.rounding.layer import LayerRounding
from minifloat.quantize.rounding.layer_fold import LayerFold
from minifloat.quantize.rounding.layer_parts import fold_of, folded_tensors, rounding_of
from minifloat.quantize.rounding.layer_tensors import layer_tensors
from minifloat.quantize.rounding.options import RoundingOptions
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT, RoundedModel, layer_content
from minifloat.quantize.rounding.saved import SavedHessians, SavedLayer
from minifloat.quantize.rounding.slots import filled_up, mean_hessian
from minifloat.quantize.rounding.statistics import Rows, Statistics


def require_independent(options: RoundingOptions) -> None:
    """Raise an error if a method takes more than the inputs of the original model."""
    name = options.method.name
    if options.method.follows_quantized or options.method.trains:
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
    """Choose the codes of all weights of a plan; the files stay until the block is left without an error.

    The codes are those of `round_checkpoint` with the text that the Hessians come from.
    """
    require_independent(options)
    saved.check_model(checkpoint)
    model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
    loader = model.loader()
    try:
        stack = LayerStack(model, loader, options.max_memory)
        if len(saved.layers) != len(stack):
            raise StatsError(
                saved.folder,
                f"expected the Hessians of {len(stack)} layers, found {len(saved.layers)}; calibrate again",
            )
        schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
        facts = {**options.to_dict(), "layout": plan.layout.name, "modules": schemes, "hessians": saved.layers}
        fingerprint = run_fingerprint(loader, CalibrationSet(()), facts)
        with LayerWork(work_dir, fingerprint, LAYER_FORMAT) as folder:
            walk = _SavedWalk(stack, plan, saved, options, checkpoint.config, progress)
            for index in range(len(folder.finished), len(stack)):
                folder.finish(index, walk.layer(index))
            if len(folder.finished) == len(stack):
                folder.finish(len(stack), layer_content({}, {"held_out": None}))
            yield RoundedModel(folder.finished)
            folder.remove()
    except LayersNotSeparableError as error:
        raise UsageError(
            f"{checkpoint.path}: its layers cannot be read one at a time, because {error}; quantize it without --stats"
        ) from error


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
        self.stack, self.saved, self.options, self.config, self.progress = stack, saved, options, config, progress
        self.infos = {tensor.source.name: tensor.source for tensor in plan.tensors}
        self.quantized = {tensor.source.name for tensor in plan.tensors if tensor.parts}
        self.parts: dict[str, tuple[str, Part]] = {
            part.module: (tensor.source.name, part) for tensor in plan.tensors for part in tensor.parts
        }

    @torch.inference_mode()
    def layer(self, index: int) -> ArrayContent:
        """Round the weights of one layer, and return its codes."""
        saved = self.saved.layer(index)
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as in the whole model
                stack.enter_context(self.stack.weights.layer(index))
            views = layer_tensors(self.stack.model, self.stack.weights.assignments(index), self.infos)
            rounding = rounding_of(views, saved.stages, self.parts, self.options.method)
            inputs = LayerInputs(self.stack.model, saved.stages, rounding.parts)
            for number, stage in enumerate(saved.stages):
                for slot in range(len(stage.slots)):
                    if (largest := saved.largest(number, slot)) is not None:
                        inputs.add(number, slot, largest, saved.tokens[number][slot])
            fold, prefix = fold_of(index, views, self.infos, self.config, saved.stages, self.parts)
            if self.options.fold and prefix:
                fold.run(saved.fold_sample)
            inputs.fold(fold.by_slot)
            rounding.measure()
            for number in range(len(saved.stages)):
                self._round_stage(number, saved, rounding, fold)
                if self.progress is not None:
                    count, layers = len(saved.stages), len(self.stack)
                    what = f"layer {index + 1} of {layers}, {saved.stages[number].name}"
                    self.progress(index * count + number + 1, count * layers, what)
            folded = folded_tensors(fold, self.quantized)
        record = {"weights": rounding.rows, "folds": fold.records, "inputs": inputs.rows()}
        return layer_content({**rounding.tensors, **folded}, record)

    def _round_stage(self, number: int, saved: SavedLayer, rounding: LayerRounding, fold: LayerFold) -> None:
        """Round the weights that read the inputs of a stage."""
        stage, tokens = saved.stages[number], saved.tokens[number]
        if not any(module in rounding.parts for slot in stage.slots for module in slot):
            return

        def statistics(slot: int) -> Statistics:
            hessian = saved.hessian(number, slot)
            if (factors := _factors(fold, number, slot)) is not None:
                hessian = hessian.mul_(factors[:, None]).mul_(factors)
            return Statistics(hessian, tokens=tokens[slot])

        mean = cache(lambda: mean_hessian(map(statistics, range(len(stage.slots))), stage.width))
        for slot, modules in enumerate(stage.slots):
            own, facts = statistics(slot), {"tokens": tokens[slot]}
            if stage.outer is not None:
                own, facts = filled_up(own, stage.width, mean)
            rounding.round_slot(modules, own, _held_out(saved, fold, number, slot), facts)


def _held_out(saved: SavedLayer, fold: LayerFold, number: int, slot: int) -> Rows | None:
    """Return the held-out inputs of a slot as they are after the folds."""
    rows = saved.held_out(number, slot)
    if rows is None:
        return None
    factors = _factors(fold, number, slot)
    rows = rows if factors is None else rows * factors
    return Rows(rows, rows)


def _factors(fold: LayerFold, number: int, slot: int) -> Tensor | None:
    """Return what the inputs of a slot are multiplied by after the folds, powers of two, float32 ``[K]``."""
    exponents = fold.exponents_of(number, slot)
    return None if exponents is None else powers_of_two(-exponents)
