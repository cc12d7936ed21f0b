"""`preview_quantization`: what `quantize_checkpoint` would write, from headers and config alone. Writes nothing."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.calibration.result import Calibration
from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check.judge import EngineVerdict
from minifloat.model.architecture.families import unknown_family_notes
from minifloat.model.plan.tensor_plan import QuantizationPlan, QuantizedShare
from minifloat.numerics.scheme import Scheme, get_scheme
from minifloat.quantize.estimate import Search
from minifloat.quantize.options import DEFAULT_OPTIONS, Budget, QuantizeOptions
from minifloat.quantize.planner import Planner, planned_source
from minifloat.quantize.report import TensorsReport
from minifloat.report.text import size_text

if TYPE_CHECKING:  # these import torch, which only a run with data needs
    from minifloat.quantize.cost import DataCost
    from minifloat.quantize.data import DataOptions


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one source tensor."""

    name: str
    shape: tuple[int, ...]
    becomes: str
    quantized: bool
    source_bytes: int  # its bytes in the source
    output_bytes: int


@dataclass(frozen=True, repr=False)
class QuantizePreview(TensorsReport):
    """The result of `preview_quantization`."""

    source: str
    destination: str
    scheme: str
    layout: str
    tensors: tuple[PlannedTensor, ...]
    share: QuantizedShare
    engines: tuple[EngineVerdict, ...]
    notes: tuple[str, ...]
    disk_free: int
    disk_bytes: int
    cost: DataCost | None = None  # what choosing codes with text takes; None: they are not chosen with text

    @property
    def fits_on_disk(self) -> bool:
        """Whether the disk has room for the tensors, and for the checkpoint that a GGUF file is made from."""
        return self.disk_bytes <= self.disk_free

    @property
    def can_run(self) -> bool:
        """Whether memory and disk hold the run."""
        return self.fits_on_disk and not (self.cost and self.cost.problems())

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        return {
            "scheme": f"{self.scheme} in {self.layout}",
            "tensors": f"{sum(tensor.quantized for tensor in self.tensors)} of {len(self.tensors)} quantized",
            "size": f"{size_text(self.source_bytes)} -> {size_text(self.output_bytes)}",
            "disk": f"{size_text(self.disk_free)} free",
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        return {
            "source": self.source,
            "destination": self.destination,
            "scheme": self.scheme,
            "layout": self.layout,
            "bytes": {"source": self.source_bytes, "output": self.output_bytes, "disk_free": self.disk_free},
            "fits_on_disk": self.fits_on_disk,
            "share": self.share.to_dict(),
            "engines": [verdict.to_dict() for verdict in self.engines],
            "notes": list(self.notes),
            "tensors": [asdict(tensor) for tensor in self.tensors],
            **({} if self.cost is None else {"data": self.cost.to_dict()}),
        }


def preview_quantization(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    scheme: str | Scheme | None = None,
    options: QuantizeOptions = DEFAULT_OPTIONS,
    *,
    calibration: Calibration | None = None,
    calibrates: bool = False,
    data: DataOptions | None = None,
) -> QuantizePreview:
    """Return what `quantize_checkpoint` would write with the same arguments, and which engines would load it.

    Codes that are chosen with data change no size.

    Args:
        source: As in `quantize_checkpoint`, as all arguments that are not named here.
        destination: As in `quantize_checkpoint`; nothing is created there.
        scheme: As in `quantize_checkpoint`.
        options: As in `quantize_checkpoint`. Within a budget, formats depend on the damage that text
            shows: sizes are those of the cheapest format everywhere, and a note says what the search takes.
        calibration: As in `quantize_checkpoint`.
        calibrates: The run would calibrate by itself: the bytes of static scales, four for each, are not counted.
        data: How codes would be chosen with text. The speed of this machine is measured for a run of minutes or more.

    Raises:
        MinifloatError: As `quantize_checkpoint`, for all mistakes that it finds before it reads weights; a disk that is
            too small is no error here.
    """
    if options.method is not None:
        from minifloat.quantize.data import DataOptions

        data = DataOptions.of(data, options.method)
    with planned_source(source, destination, options) as planner:
        wanted = get_scheme(scheme) if isinstance(scheme, str) else scheme
        if options.budget is None:
            plan, notes = planner.chosen(wanted)
            search = None if data is None else _inputs_search(planner.checkpoint, wanted, plan, data)
        else:
            plan, notes, search = _within_budget(planner, wanted, options.budget)
        notes = (*notes, *(_measured_later(wanted, plan) if calibrates else planner.unmeasured(wanted, plan)))
        run = planner.run(plan, notes, calibration, calibrates=calibrates)
        return QuantizePreview(
            str(source),
            str(destination),
            run.plan.scheme.name,
            planner.converted_to or run.plan.layout.name,
            _tensors(run.checkpoint, run.plan),
            QuantizedShare.of(run.plan),
            run.verdicts,
            (*run.engine_notes, *run.report_notes, *unknown_family_notes(run.checkpoint.config)),
            shutil.disk_usage(Path(destination).absolute().parent).free,
            planner.disk_bytes(run.plan),
            _cost(run.checkpoint, plan, data, Path(destination), search),
        )


def _measured_later(scheme: Scheme | None, plan: QuantizationPlan) -> tuple[str, ...]:
    """Return what a run with text may change in a default scheme that rounds inputs."""
    if scheme is not None or plan.scheme.activation is None:
        return ()
    return (
        f"With --data, quantize measures what {plan.scheme.name} costs by rounding inputs, and keeps them in 16 bits "
        "for some groups of weights, or for all (fp8), where the bounds of compare need it; sizes hardly change.",
    )


def _inputs_search(
    checkpoint: Checkpoint, scheme: Scheme | None, plan: QuantizationPlan, data: DataOptions
) -> Search | None:
    from minifloat.quantize.rounding.input_choice import chooses_inputs, inputs_search

    if not chooses_inputs(scheme, plan):
        return None
    return inputs_search(plan, checkpoint.config)


def _within_budget(
    planner: Planner, scheme: Scheme | None, budget: Budget
) -> tuple[QuantizationPlan, tuple[str, ...], Search]:
    """Return the plan in the cheapest format, a note on it, and what the search for a mixture takes."""
    from minifloat.quantize.rounding.budget import budget_search, require_feasible
    from minifloat.quantize.rounding.budget_formats import find_formats

    formats = find_formats(planner.checkpoint, planner.plan, scheme, planner.overrides, planner.options.target)
    require_feasible(budget, formats.groups)
    plan, config = planner.plan(formats.scheme, planner.overrides), planner.checkpoint.config
    note = (
        f"Sizes are those of {formats.scheme.name} everywhere, the least. The mixture within {budget} depends on what "
        "text shows."
    )
    return plan, (note,), budget_search(formats, plan, budget, config)


def _cost(
    checkpoint: Checkpoint, plan: QuantizationPlan, data: DataOptions | None, destination: Path, search: Search | None
) -> DataCost | None:
    if data is None or not data.sources:
        return None
    from minifloat.quantize.cost import cost_of

    return cost_of(checkpoint, plan, data, destination, search)[2]


def _tensors(checkpoint: Checkpoint, plan: QuantizationPlan) -> tuple[PlannedTensor, ...]:
    return tuple(
        PlannedTensor(
            tensor.source.name,
            tensor.source.shape,
            ", ".join(dict.fromkeys(part.scheme.name for part in tensor.parts)) or tensor.reason,
            bool(tensor.parts),
            checkpoint.stored_bytes(tensor.source),
            sum(output.nbytes for output in tensor.outputs),
        )
        for tensor in plan.tensors
    )
