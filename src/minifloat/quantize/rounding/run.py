"""`round_checkpoint`: chooses the codes of all weights of a plan with text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import layers_required
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.walk import LayerWork
from minifloat.calibration.model import CalibrationModel, check_data
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.model.runtime.load import Loader
from minifloat.quantize.rounding.group_damage import DamageRequest, Damages
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT, RoundedModel
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
        sizes = [len(part.sequences) for part in texts.parts]
        everything = CalibrationSet(tuple(sequence for part in texts.parts for sequence in part.sequences))
        fingerprint = run_fingerprint(loader, everything, _facts(options, plan), sizes)
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
        check_data(loader.model, *texts.parts)
        yield loader, LayerStack(model, loader, options.max_memory)


def _facts(options: RoundingOptions, plan: QuantizationPlan) -> dict[str, Any]:
    """Return what determines the codes besides model and data, as JSON values."""
    schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
    return {**options.to_dict(), "layout": plan.layout.name, "modules": schemes}
