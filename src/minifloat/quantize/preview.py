"""`preview_quantization`: what `quantize_checkpoint` would write, from headers and config alone. Writes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minifloat.calibration.result import Calibration
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.rewrite import refuse_inside
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.deploy.check.deployment import check_everywhere
from minifloat.deploy.check.document import MODEL
from minifloat.deploy.check.engine_verdict import EngineVerdict, engine_verdicts
from minifloat.deploy.check.subject import Subject
from minifloat.model.architecture.families import unknown_family_notes
from minifloat.model.layouts import choose_writer
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.plain_view import plain_view
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.share import QuantizedShare, require_share
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import DEFAULT_SCHEME, Scheme, get_scheme
from minifloat.quantize.engines import EngineChoice
from minifloat.quantize.quantized_source import with_dequantized_copies
from minifloat.quantize.static_scales import apply_calibration
from minifloat.report.document import ShortReport
from minifloat.report.text import size_text


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one source tensor.

    Attributes:
        source_bytes: Its bytes in the source.
    """

    name: str
    shape: tuple[int, ...]
    becomes: str
    quantized: bool
    source_bytes: int
    output_bytes: int


@dataclass(frozen=True, repr=False)
class QuantizePreview(ShortReport):
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

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(tensor.source_bytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors in the output."""
        return sum(tensor.output_bytes for tensor in self.tensors)

    @property
    def fits_on_disk(self) -> bool:
        """Whether the disk has room for the tensors."""
        return self.output_bytes <= self.disk_free

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
        }


def preview_quantization(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    scheme: str | Scheme | None = None,
    *,
    layout: str | None = None,
    overrides: Sequence[str | Override] = (),
    overwrite: bool = False,
    calibration: Calibration | None = None,
    calibrates: bool = False,
    kv_cache: bool = False,
    from_quantized: bool = False,
    target: str | None = None,
    revision: str | None = None,
    mtp: bool = False,
    allow_partial: bool = False,
) -> QuantizePreview:
    """Return what `quantize_checkpoint` would write with the same arguments, and which engines would load it.

    Codes that are chosen with data change no size; formats within a budget depend on the data, so a budget has no
    preview.

    Args:
        source: As in `quantize_checkpoint`, as all arguments that are not named here.
        destination: As in `quantize_checkpoint`; nothing is created there.
        scheme: As in `quantize_checkpoint`.
        layout: As in `quantize_checkpoint`.
        overrides: As in `quantize_checkpoint`.
        overwrite: As in `quantize_checkpoint`.
        calibration: As in `quantize_checkpoint`.
        calibrates: The run would calibrate by itself: the bytes of static scales, four for each, are not counted.
        kv_cache: As in `quantize_checkpoint`.
        from_quantized: As in `quantize_checkpoint`.
        target: As in `quantize_checkpoint`.
        revision: As in `quantize_checkpoint`.
        mtp: As in `quantize_checkpoint`.
        allow_partial: As in `quantize_checkpoint`.

    Raises:
        MinifloatError: As `quantize_checkpoint`, for all mistakes that it finds before it reads weights; a disk that is
            too small is no error here.
    """
    parsed = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
    wanted = get_scheme(scheme or DEFAULT_SCHEME) if not isinstance(scheme, Scheme) else scheme
    with Checkpoint.open(model_folder(source, revision=revision)) as stored:
        checkpoint = plain_view(stored) if from_quantized else stored
        refuse_contradictions(checkpoint.config, checkpoint.tensors, checkpoint.path)
        refuse_inside(checkpoint.path, Path(destination))
        CheckpointWriter.check_destination(destination, overwrite=overwrite)
        planner = planner_of(checkpoint, layout, mtp=mtp, allow_partial=allow_partial)
        choice = EngineChoice(checkpoint, planner, parsed, target)
        engine_notes: tuple[str, ...] = ()
        if scheme is None:
            wanted, engine_notes = choice.default(wanted)
        plan = choice.plan(wanted)
        notes: tuple[str, ...] = ()
        if calibration is not None or not calibrates:
            plan, _, notes = apply_calibration(plan, checkpoint, calibration, kv_cache=kv_cache)
        verdicts = engine_verdicts(check_everywhere(Subject.of_plan(checkpoint, plan), MODEL))
        return QuantizePreview(
            str(source),
            str(destination),
            plan.scheme.name,
            plan.layout.name,
            _tensors(checkpoint, plan),
            QuantizedShare.of(plan),
            verdicts,
            (*engine_notes, *choice.notes(plan, verdicts), *notes, *unknown_family_notes(checkpoint.config)),
            shutil.disk_usage(Path(destination).absolute().parent).free,
        )


def planner_of(
    checkpoint: Checkpoint, layout: str | None, *, mtp: bool, allow_partial: bool
) -> Callable[[Scheme, Sequence[Override]], QuantizationPlan]:
    """Return the function that plans the output of a checkpoint for a scheme and its overrides."""

    def planner(scheme: Scheme, overrides: Sequence[Override]) -> QuantizationPlan:
        plan = make_plan(checkpoint, scheme, choose_writer(layout, checkpoint.config, scheme), overrides, mtp=mtp)
        if not allow_partial:
            require_share(plan)
        return with_dequantized_copies(plan, checkpoint)

    return planner


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
