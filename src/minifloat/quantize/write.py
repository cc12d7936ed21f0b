"""`write_run`: stream the tensors of a planned run into a new folder, with a few slabs of them in memory at a time.

The tensors of each shard go to a pool of threads (the casts and the file system both release the interpreter lock),
each output shard is synced and recorded as soon as it is complete, and the folder is renamed into place at the very
end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minifloat._version import __version__
from minifloat.checkpoint import CONFIG_FILE, Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.hub import model_name
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.rewrite import (
    CARD_FILE,
    NEAREST,
    REPORT_FILE,
    ROUNDING,
    RewriteJob,
    encode_json,
    fingerprint,
    record_check,
    restart_notes,
    worker_pool,
    write_index,
    write_sidecars,
)
from minifloat.checkpoint.schema import map_of, number
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.kernels import processors
from minifloat.model.architecture.families import family_of, unknown_family_notes
from minifloat.model.architecture.roles import expert_group
from minifloat.model.layouts.decoded import DecodedCheckpoint, quantized_model_config
from minifloat.model.plan.quantization import kept_experts
from minifloat.model.plan.tensor_plan import MTP, Part, QuantizationPlan, QuantizedShare, TensorPlan
from minifloat.model.runtime.engine_names import EngineNames, engine_names
from minifloat.numerics.scheme import SCALE_RULE, without_static_scales
from minifloat.quantize.convert.job import convert_opened
from minifloat.quantize.converted import require_kept
from minifloat.quantize.document import BUDGET_CHART, model_card
from minifloat.quantize.nonfinite import nonfinite_notes, tensors_allowed
from minifloat.quantize.options import ConvertOptions
from minifloat.quantize.planner import PlannedRun
from minifloat.quantize.provenance import provenance, quantize_options
from minifloat.quantize.quantized_source import (
    copied_codes,
    copy_codes,
    describe_source,
    dropped_tensors,
    source_notes,
)
from minifloat.quantize.report import TENSOR_ROW, QuantizeReport, TensorReport, name_of_part
from minifloat.quantize.stream import (
    Caster,
    copy_digest,
    copy_tensor,
    dequantize_copy,
    part_amax,
    part_digest,
    quantize_part,
    write_rounded_copy,
    write_rounded_part,
)

if TYPE_CHECKING:  # these import torch, which only a run with data needs
    from minifloat.quantize.data import RoundedOutput


def write_run(
    run: PlannedRun,
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    progress: Progress | None = None,
    started: float | None = None,
) -> QuantizeReport:
    started = time.perf_counter() if started is None else started
    options, decoded, recipe = run.planner.options, run.planner.decoded, run.recipe
    layout, destination = run.planner.converted_to, Path(destination)
    with CheckpointWriter(
        destination if layout is None else destination.absolute().with_name(f"{destination.name}.quantized"),
        fingerprint=fingerprint(run.planner.stored, recipe, _constants(run.plan)),
        total_bytes=run.planner.disk_bytes(run.plan),
        overwrite=options.overwrite,
        check_record=record_check(TENSOR_ROW, amax=map_of(number(0))),
    ) as writer:
        with worker_pool(processors.workers(options.workers), writer) as pool:
            job = QuantizeJob.of(run, writer, pool, progress)
            tensors = tuple(TensorReport.from_dict(entry) for entry in job.run())
            if decoded is not None:
                tensors += dropped_tensors(decoded, pool, copy_digest)
        names = _engine_names(run.checkpoint, run.plan)
        source_facts = None if decoded is None else describe_source(decoded, tensors)
        report = QuantizeReport(
            source=str(source),
            destination=str(destination),
            recipe=recipe,
            provenance=provenance(run.checkpoint, "quantize", quantize_options(recipe), tensors),
            tensors=tensors,
            share=QuantizedShare.of(run.plan),
            engines=run.verdicts,
            activations=run.activations,
            notes=(
                *run.engine_notes,
                *source_notes(source_facts),
                *run.report_notes,
                *unknown_family_notes(run.checkpoint.config),
                *names.notes,
                *_mtp_note(run.plan),
                *nonfinite_notes((tensor.name, tensor.detail) for tensor in tensors),
                *(() if run.rounded is None else run.rounded.notes),
                *restart_notes(writer),
            ),
            quantized_source=source_facts,
            rounding=None if run.rounded is None else run.rounded.to_dict(),
            seconds=time.perf_counter() - started,
            resumed_shards=job.resumed,
        )
        _write_small_files(run, names, writer, report)
        if layout is not None:
            require_kept(layout, tensors)
            return writer.use_up(lambda output: _converted(run, report, output, progress))
        writer.commit()
    return report


def _converted(run: PlannedRun, report: QuantizeReport, output: Path, progress: Progress | None) -> QuantizeReport:
    """Convert the whole checkpoint in a work folder to the destination; return the report with what that adds."""
    options = run.planner.options
    made = ConvertOptions(allow_nonfinite=options.allow_nonfinite, workers=options.workers, overwrite=options.overwrite)
    with Checkpoint.open_unfinished(output) as checkpoint:
        checkpoint.name = model_name(run.planner.stored.path)
        converted = convert_opened(
            checkpoint, report.source, report.destination, options.layout, made, gguf=options.gguf, progress=progress
        )
    return replace(report, destination=converted.destination, notes=(*report.notes, *converted.notes))


def _mtp_note(plan: QuantizationPlan) -> Iterator[str]:
    """Yield a note if layers of multi-token prediction are kept, or have another scheme than the model."""
    if any(tensor.reason == MTP for tensor in plan.tensors):
        yield "Layers of multi-token prediction keep their precision; --mtp quantizes them."
    default = without_static_scales(plan.scheme)
    drafts = [part for tensor in plan.tensors if tensor.drafts for part in tensor.parts if part.scheme == default]
    if drafts and default != plan.scheme:
        yield (
            f"{len(drafts)} weights of multi-token prediction are {default.name}, not {plan.scheme.name}: no text runs "
            "through these layers, so that their inputs have no static scales."
        )


def _engine_names(checkpoint: Checkpoint, plan: QuantizationPlan) -> EngineNames:
    """Return the names in transformers of the modules that config.json lists."""
    linears = [module for module in plan.modules if expert_group(module) is None]
    return engine_names(checkpoint, (*plan.kept, *linears))


def _constants(plan: QuantizationPlan) -> list[tuple[str, float]]:
    """Return the names and values of the scales that come from calibration, not from the source."""
    return [(constant.tensor.name, constant.value) for tensor in plan.tensors for constant in tensor.constants]


def _write_small_files(run: PlannedRun, names: EngineNames, writer: CheckpointWriter, report: QuantizeReport) -> None:
    """Write every file that is not a shard: tokenizer and other sidecars, index, report, model card and config."""
    checkpoint, plan = run.checkpoint, run.plan
    write_sidecars(checkpoint, writer)
    if len(checkpoint.shards) > 1:
        shards = {shard: [output for tensor in group for output in tensor.outputs] for shard, group in plan.by_shard()}
        write_index(writer, shards)
    kept = (*plan.kept, *names.unlisted, *kept_experts(plan, family_of(checkpoint.config)))
    quantization = plan.layout.quantization_config(plan.modules, kept, plan.kv, names.others)
    config = quantized_model_config(checkpoint.config, plan.layout, quantization)
    writer.write_file(REPORT_FILE, encode_json(report.to_dict()))
    writer.write_file(CARD_FILE, model_card(checkpoint, report, run.engines, run.planner.options.base_model).encode())
    writer.write_file(CONFIG_FILE, encode_json(config))
    if run.rounded is not None and run.rounded.within is not None:
        from minifloat.quantize.rounding.budget import budget_chart

        writer.write_file(BUDGET_CHART, budget_chart(run.rounded.within).encode())


@dataclass
class QuantizeJob(RewriteJob[TensorPlan]):
    """One run over all shards."""

    plan: QuantizationPlan
    caster: Caster
    decoded: DecodedCheckpoint | None = None  # the source, if it is quantized
    rounded: RoundedOutput | None = None  # the output tensors that were made with data; None: there are none
    allowed: frozenset[str] = frozenset()  # tensors that may hold NaN or Inf
    amaxes: dict[str, float] = field(default_factory=dict, init=False)
    copied: frozenset[str] = field(default=frozenset(), init=False)

    @classmethod
    def of(
        cls, run: PlannedRun, writer: CheckpointWriter, pool: ThreadPoolExecutor, progress: Progress | None
    ) -> QuantizeJob:
        """Return the job that streams the tensors of a run."""
        metadata = {"format": "pt", "minifloat": __version__, SCALE_RULE: run.plan.scheme.weight.rule.value}
        if run.rounded is not None:
            metadata[ROUNDING] = str(run.rounded.recipe["method"])
        elif not run.planner.options.from_quantized:  # such a source may have codes already, which are kept
            metadata[ROUNDING] = NEAREST
        shards, planner = dict(run.plan.by_shard()), run.planner
        return cls(
            run.checkpoint,
            writer,
            pool,
            shards,
            metadata,
            progress,
            run.plan,
            planner.caster,
            planner.decoded,
            run.rounded,
            tensors_allowed(run.checkpoint, planner.options.allow_nonfinite),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounded is None and self.decoded is not None:
            self.copied = copied_codes(self.decoded, self.plan)

    def sources(self, item: TensorPlan) -> Sequence[TensorInfo]:
        return (item.source,)

    def outputs(self, item: TensorPlan) -> Sequence[OutputTensor]:
        return item.outputs

    def digests(self, item: TensorPlan) -> dict[str, Future[str]]:
        if not item.parts:
            return {item.source.name: self.pool.submit(copy_digest, self.checkpoint, item.source)}
        return {
            name_of_part(item, part): self.pool.submit(part_digest, self.checkpoint, item.source, part)
            for part in item.parts
        }

    def submit(self, item: TensorPlan, shard: ShardWriter | None) -> list[Future[Any]]:
        """Write the constants of a tensor, and hand its weights or its copy to the pool."""
        assert shard is not None  # every tensor of a plan has an output
        for constant in item.constants:
            shard.write(constant.tensor.name, np.float32(constant.value).reshape(1))
        if not item.parts:
            if self.rounded is not None and item.source.name in self.rounded.model:
                return [self.pool.submit(write_rounded_copy, self.checkpoint, item.source, shard, self.rounded.model)]
            if item.dtype is not None and self.decoded is not None:
                return [self.pool.submit(dequantize_copy, self.decoded, item.source, item.dtype, shard)]
            copy = partial(copy_tensor, allowed=self.allowed)
            return [self.pool.submit(copy, self.checkpoint, item.source, shard, self.caster)]
        return [self._submit_part(item.source, part, shard) for part in item.parts]

    def _submit_part(self, source: TensorInfo, part: Part, shard: ShardWriter) -> Future[Any]:
        """Hand one weight to the pool: its codes that were chosen with data, or its cast."""
        if self.rounded is not None and part.tensors.codes.name in self.rounded.model:
            return self.pool.submit(write_rounded_part, self.checkpoint, source, part, shard, self.rounded.model)
        if self.decoded is not None and part.module in self.copied:
            return self.pool.submit(copy_codes, self.decoded, source, part, shard)
        amax = self.amaxes.get(part.group)
        return self.pool.submit(quantize_part, self.checkpoint, source, part, amax, shard, self.caster)

    def entries(self, item: TensorPlan, results: list[Any]) -> list[dict[str, Any]]:
        source_bytes = self.checkpoint.stored_bytes(item.source)
        if not item.parts:
            changed = self.rounded is not None and item.source.name in self.rounded.model
            return [asdict(TensorReport.copied(item, source_bytes, results[0], changed=changed))]
        return [
            asdict(TensorReport.quantized(item, part, source_bytes, stats, digest, copied=part.module in self.copied))
            for part, (stats, digest) in zip(item.parts, results, strict=True)
        ]

    def prepare(self) -> None:
        """Measure the amax of groups that share a scale; start over if that of a finished shard changed."""
        self.amaxes = self._measure_amaxes()
        recorded = [pair for record in self.writer.finished.values() for pair in record["amax"].items()]
        if any(self.amaxes.get(group, amax) != amax for group, amax in recorded):
            self.writer.start_over("layers that share a scale changed")
            self.amaxes = self._measure_amaxes()

    def record_beside(self, items: Sequence[TensorPlan]) -> dict[str, Any]:
        """Return the amax of each group that the shard has a member of."""
        groups = [part.group for item in items for part in item.parts]
        return {"amax": {group: self.amaxes[group] for group in groups if group in self.amaxes}}

    def _is_settled(self, part: Part) -> bool:
        """Return whether the codes of a part exist already: chosen with data, or in the source."""
        return part.module in self.copied or (
            self.rounded is not None and part.tensors.codes.name in self.rounded.model
        )

    def _measure_amaxes(self) -> dict[str, float]:
        unfinished = {
            part.group
            for shard, tensors in self.shards.items()
            if shard not in self.writer.finished
            for tensor in tensors
            for part in tensor.parts
        }
        futures = [
            (part.group, self.pool.submit(part_amax, self.checkpoint, tensor.source, part, self.caster))
            for tensor in self.plan.tensors
            for part in tensor.parts
            if part.scheme.weight.needs_tensor_amax and part.group in unfinished and not self._is_settled(part)
        ]
        amaxes: dict[str, float] = {}
        for group, future in futures:
            amaxes[group] = max(amaxes.get(group, 0.0), future.result())
            self.report_progress("measuring amax")
        return amaxes
