"""`round_checkpoint`: choose the codes of all weights of a plan with calibration text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.model import CalibrationModel, check_data
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.rounding.damage import GroupsToMeasure
from minifloat.quantize.rounding.options import RoundingOptions
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT, RoundedModel
from minifloat.quantize.rounding.tune.cost import require_memory, tune_cost
from minifloat.quantize.rounding.tune.run import tune
from minifloat.quantize.rounding.walk import RoundingWalk


@contextmanager
def round_checkpoint(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    kept: CalibrationSet,
    held_out: CalibrationSet,
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
    groups: GroupsToMeasure | None = None,
) -> Iterator[RoundedModel]:
    """Choose the codes of all weights of a plan; the files stay until the block is left without an error."""
    model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
    loader = model.loader()
    for data in (kept, held_out):
        check_data(data, loader.model.config.get_text_config().vocab_size)
    if options.method.trains:
        longest = max(map(len, (*kept.sequences, *held_out.sequences)))
        require_memory(tune_cost(checkpoint, plan, loader.model.dtype, longest), options.device, options.max_memory)
    try:
        stack = LayerStack(model, loader, options.max_memory)
        schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
        facts = {**options.to_dict(), "layout": plan.layout.name, "modules": schemes}
        if groups is not None:
            facts["groups"] = groups.to_dict()
        both = CalibrationSet((*kept.sequences, *held_out.sequences))
        fingerprint = run_fingerprint(loader, both, facts, len(kept.sequences))
        with LayerWork(work_dir, fingerprint, LAYER_FORMAT) as folder:
            walk = RoundingWalk(stack, plan, kept, held_out, options, checkpoint.config, progress, groups)
            walk.run(folder)
            if options.method.trains and len(folder.finished) == len(stack) + 1:
                rounded = RoundedModel(folder.finished)
                tuned = tune(model, plan, rounded, kept, held_out, options.tuning, progress)
                folder.finish(len(folder.finished), tuned)
            yield RoundedModel(folder.finished)
            folder.remove()
    except LayersNotSeparableError as error:
        raise UsageError(
            f"{checkpoint.path}: its layers cannot be run one at a time, because {error}; quantize it without data"
        ) from error
