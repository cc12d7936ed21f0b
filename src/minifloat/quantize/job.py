"""`quantize_checkpoint`: write a quantized checkpoint from a plain one, with a few slabs of it in memory at a time.

The plan is made first. Then the tensors of each shard go to a pool of threads (the casts and the file system both
release the interpreter lock), each output shard is synced and recorded as soon as it is complete, and the folder is
renamed into place at the very end. An interrupted run continues after its last complete shard, once the sources of the
finished shards have been hashed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minifloat._version import __version__
from minifloat.calibration.result import Calibration
from minifloat.checkpoint import CONFIG_FILE, Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.hub import is_hub_id, model_folder
from minifloat.checkpoint.job import RewriteJob, record_check
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.rewrite import (
    CARD_FILE,
    NEAREST,
    REPORT_FILE,
    ROUNDING,
    encode_json,
    fingerprint,
    refuse_inside,
    restart_notes,
    worker_pool,
    write_index,
    write_sidecars,
)
from minifloat.checkpoint.schema import map_of, number
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.deploy.check.deployment import Reports, check_everywhere
from minifloat.deploy.check.document import MODEL
from minifloat.deploy.check.engine_verdict import engine_verdicts
from minifloat.deploy.check.subject import Subject
from minifloat.errors import UsageError
from minifloat.kernels import processors
from minifloat.model.architecture.families import family_of, unknown_family_notes
from minifloat.model.architecture.groups import expert_group
from minifloat.model.layouts import get_writer
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.model.layouts.model_config import quantized_model_config
from minifloat.model.layouts.plain_view import plain_view
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import kept_experts
from minifloat.model.plan.share import QuantizedShare
from minifloat.model.plan.tensor_plan import MTP, Part, QuantizationPlan, TensorPlan
from minifloat.model.runtime.engine_names import EngineNames, engine_names
from minifloat.numerics.scheme import DEFAULT_SCHEME, Scheme, get_scheme, without_static_scales
from minifloat.quantize.card import model_card
from minifloat.quantize.copied_codes import copied_codes, copy_codes
from minifloat.quantize.document import BUDGET_CHART
from minifloat.quantize.engines import EngineChoice
from minifloat.quantize.preview import planner_of
from minifloat.quantize.provenance import describe_recipe, provenance, quantize_options
from minifloat.quantize.quantized_source import (
    describe_source,
    dropped_tensors,
    source_notes,
)
from minifloat.quantize.report import TENSOR_ROW, QuantizeReport, TensorReport, name_of_part
from minifloat.quantize.static_scales import apply_calibration
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
    from minifloat.calibration.data import SourceLike
    from minifloat.quantize.rounded import DataOptions, RoundedOutput
    from minifloat.quantize.rounding.budget.formats import Planner
    from minifloat.quantize.rounding.budget.search import WithinBudget
    from minifloat.quantize.rounding.budget.target import Budget


def quantize_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    scheme: str | Scheme | None = None,
    *,
    layout: str | None = None,
    overrides: Sequence[str | Override] = (),
    workers: int | None = None,
    overwrite: bool = False,
    calibration: Calibration | None = None,
    data: DataOptions | SourceLike | Sequence[SourceLike] | None = None,
    method: str | None = None,
    budget: Budget | None = None,
    kv_cache: bool = False,
    from_quantized: bool = False,
    target: str | None = None,
    device: str = "cpu",
    impl: str = "auto",
    progress: Progress | None = None,
    revision: str | None = None,
    base_model: str | None = None,
    mtp: bool = False,
    allow_partial: bool = False,
    announce: Callable[[str], None] | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint into a new folder.

    Args:
        source: A folder or a model of the hub: Hugging Face layout, safetensors, BF16 / F16 / F32 weights; with
            `from_quantized` in any layout that `layouts.describe` reads.
        destination: A folder that does not exist yet, in one that does.
        scheme: A name of `SCHEMES`, or a `Scheme`; by default ``"fp8-block"``, or where no engine but minifloat, or
            not `target`, would load that, a scheme of 8 bits that loads; a note says so. With `budget` the cheapest
            format of the mixture, by default the cheapest weight-only scheme that the model allows.
        layout: A name of `layouts.WRITERS`; by default compressed-tensors, and for gpt-oss in MXFP4 its own.
        overrides: ``REGEX=SCHEME`` or ``REGEX=bf16``; the last override that matches a module decides.
        workers: Threads; by default one per core that this process may use, at most 8.
        overwrite: Replace an existing destination, at the end.
        calibration: Activation statistics, and the rule that turns them into static scales.
        data: Text that codes are chosen with: files, folders, data sets, or ``"self"`` for text that the model itself
            writes; or `DataOptions` with all options. None: every weight is rounded to nearest.
        method: A name of `minifloat.quantize.rounding.methods.METHODS`; by default ``"match"`` with data.
        budget: Bits, bytes or KL divergence within which the formats of fused groups of weights are chosen; needs
            `data`. `overrides` keep the format of the modules that they match.
        kv_cache: Write scales of an FP8 KV cache; needs `calibration`.
        from_quantized: The source is quantized already. It is decoded row by row, and errors are against its
            dequantized values. Weights that it stores in the format of the scheme keep their codes and scales.
        target: Where the output is to run, as in ``"vllm:h100:tp4"``; a checkpoint that would not load is an error.
        device: Where weights are cast: "cpu", "cuda" or "cuda:N". The output is the same, bit for bit; the sums of
            errors in the report differ by the order of summation.
        impl: Implementation of the cast: "auto", "cpu", "reference" or "triton"; CUDA devices run "triton".
        progress: Called from this thread as work completes.
        revision: Branch, tag or commit of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.
        base_model: For the model card: the source's id on the hub, where the source is a folder.
        mtp: Quantize layers of multi-token prediction too, which are kept otherwise.
        allow_partial: Accept that less than half of the linear weights is quantized, which is an error otherwise.
        announce: Called before anything is written with each note on engines that will not load the output.

    Returns:
        The report on every tensor, with the error of every cast.

    Raises:
        UsageError: An argument is wrong, or less than half of the linear weights would be quantized; nothing was
            written.
        AlreadyQuantizedError: The source is quantized, and `from_quantized` is False.
        ConversionError: The quantization of the source has parts other than codes and scales.
        CheckpointError: The source is damaged, or is no checkpoint.
        HubError: The hub has no such source, refuses it, or cannot be reached.
        TensorError: A tensor cannot be quantized; it is named and nothing is left behind.
        DataError: The text of `data` is missing, too short, or does not fit the model.
        SingularHessianError: The inputs of a linear allow no error compensation.
        NotCalibratedError: The statistics lack a module that needs a static scale.
        SaturationError: More held-out activations would saturate than `calibration.max_saturation` allows.
        KernelUnavailable: This machine lacks `device`, or what `impl` needs.
        StorageError: The system refused to read or write; the work folder stays, and the same call continues.
    """
    started = time.perf_counter()
    chosen_scheme = get_scheme(scheme) if isinstance(scheme, str) else scheme
    if budget is None:
        chosen_scheme = chosen_scheme or get_scheme(DEFAULT_SCHEME)
    if layout is not None:
        get_writer(layout)
    parsed_overrides = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
    caster = Caster.of(device, impl)
    threads = processors.workers(workers)
    data_options = _data_options(data, method, calibration, kv_cache=kv_cache)
    if budget is not None and data_options is None:
        raise UsageError(
            f"a budget of {budget} chooses formats by the damage that text shows: give --data FILE, or --data self for "
            "text that the model writes itself"
        )
    if base_model is not None and not is_hub_id(base_model):
        raise UsageError(f"base_model: expected the id of a model of the hub, ORG/NAME, got {base_model!r}")
    with Checkpoint.open(model_folder(source, revision=revision)) as stored:
        checkpoint = plain_view(stored) if from_quantized else stored
        refuse_contradictions(checkpoint.config, checkpoint.tensors, checkpoint.path)
        refuse_inside(checkpoint.path, Path(destination))
        CheckpointWriter.check_destination(destination, overwrite=overwrite)
        planner = planner_of(checkpoint, layout, mtp=mtp, allow_partial=allow_partial)
        with ExitStack() as stack:
            rounded = None
            if budget is not None and data_options is not None:
                rounded = stack.enter_context(
                    _within_budget(
                        checkpoint,
                        planner,
                        chosen_scheme,
                        parsed_overrides,
                        budget,
                        data_options,
                        Path(destination),
                        target,
                        progress,
                    )
                )
                chosen_scheme, parsed_overrides = rounded.scheme, rounded.overrides
            assert chosen_scheme is not None
            choice = EngineChoice(checkpoint, planner, parsed_overrides, target)
            engine_notes: tuple[str, ...] = ()
            if scheme is None and budget is None:
                chosen_scheme, engine_notes = choice.default(chosen_scheme)
            plan = choice.plan(chosen_scheme)
            caster.require(dict.fromkeys([plan.scheme, *plan.modules.values()]))
            if rounded is None:
                rounded = stack.enter_context(_rounding(checkpoint, plan, data_options, Path(destination), progress))
            if rounded is not None:
                calibration = rounded.calibration(checkpoint)
            plan, activations, notes = apply_calibration(plan, checkpoint, calibration, kv_cache=kv_cache)
            engines = check_everywhere(Subject.of_plan(checkpoint, plan), MODEL)
            verdicts = engine_verdicts(engines)
            engine_notes = (*engine_notes, *choice.notes(plan, verdicts))
            if announce is not None:
                for note in engine_notes:
                    announce(note)
            names = _engine_names(checkpoint, plan)
            writer = stack.enter_context(
                CheckpointWriter(
                    destination,
                    fingerprint=fingerprint(
                        stored,
                        recipe := describe_recipe(
                            plan,
                            calibration,
                            None if rounded is None else rounded.recipe,
                            from_quantized=from_quantized,
                        ),
                        _constants(plan),
                    ),
                    total_bytes=plan.output_bytes,
                    overwrite=overwrite,
                    check_record=record_check(TENSOR_ROW, amax=map_of(number(0))),
                )
            )
            with worker_pool(threads, writer) as pool:
                metadata = {"format": "pt", "minifloat": __version__, "scale_rule": plan.scheme.weight.rule.value}
                if rounded is not None:
                    metadata[ROUNDING] = str(rounded.recipe["method"])
                elif not from_quantized:  # such a source may have codes already, which are kept
                    metadata[ROUNDING] = NEAREST
                shards = dict(plan.by_shard())
                job = QuantizeJob(checkpoint, writer, pool, shards, metadata, progress, plan, caster, rounded)
                tensors = tuple(TensorReport.from_dict(entry) for entry in job.run())
                tensors += dropped_tensors(checkpoint, pool, copy_digest)
            source_facts = describe_source(checkpoint, tensors)
            report = QuantizeReport(
                source=str(source),
                destination=str(destination),
                recipe=recipe,
                provenance=provenance(checkpoint, "quantize", quantize_options(recipe), tensors),
                tensors=tensors,
                share=QuantizedShare.of(plan),
                engines=verdicts,
                activations=activations,
                notes=(
                    *engine_notes,
                    *source_notes(source_facts),
                    *notes,
                    *unknown_family_notes(checkpoint.config),
                    *names.notes,
                    *_mtp_note(plan),
                    *(() if rounded is None else rounded.notes),
                    *restart_notes(writer),
                ),
                quantized_source=source_facts,
                rounding=None if rounded is None else rounded.to_dict(),
                seconds=time.perf_counter() - started,
                resumed_shards=job.resumed,
            )
            _write_small_files(checkpoint, plan, names, writer, report, engines, base_model)
            if rounded is not None and rounded.within is not None:
                _write_budget_chart(writer, rounded.within)
            writer.commit()
    return report


@contextmanager
def _within_budget(
    checkpoint: Checkpoint,
    planner: Planner,
    scheme: Scheme | None,
    overrides: Sequence[Override],
    budget: Budget,
    data: DataOptions,
    destination: Path,
    target: str | None,
    progress: Progress | None,
) -> Iterator[RoundedOutput]:
    """Yield the formats and codes that the method of `data` chose within a budget."""
    from minifloat.quantize.rounded import budgeted_output

    with budgeted_output(
        checkpoint, planner, scheme, overrides, budget, data, destination, target, _copy_writer(checkpoint), progress
    ) as rounded:
        yield rounded


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


def _write_budget_chart(writer: CheckpointWriter, within: WithinBudget) -> None:
    """Write the chart of KL divergence against bits, which the model card shows."""
    from minifloat.quantize.rounding.budget.chart import budget_chart

    writer.write_file(BUDGET_CHART, budget_chart(within).encode())


@contextmanager
def _rounding(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions | None,
    destination: Path,
    progress: Progress | None,
) -> Iterator[RoundedOutput | None]:
    """Yield the codes that the method of `data` chose; None without data."""
    if data is None:
        yield None
        return
    from minifloat.quantize.rounded import rounded_output

    with rounded_output(checkpoint, plan, data, destination, _copy_writer(checkpoint), progress) as rounded:
        yield rounded


def _copy_writer(checkpoint: Checkpoint) -> Callable[[Path], object]:
    """Return a function that writes a copy of a model with half of its bytes to a new folder."""
    from_quantized = isinstance(checkpoint, DecodedCheckpoint)
    return lambda folder: quantize_checkpoint(
        checkpoint.path, folder, "fp8", allow_partial=True, from_quantized=from_quantized
    )


def _data_options(
    data: DataOptions | SourceLike | Sequence[SourceLike] | None,
    method: str | None,
    calibration: Calibration | None,
    *,
    kv_cache: bool,
) -> DataOptions | None:
    """Return the options that `data` and `method` stand for; None, without importing torch, if there is no data."""
    if data is None and method in (None, NEAREST):
        return None
    from minifloat.quantize.rounded import DataOptions

    options = DataOptions.of(data, method)
    if options is None:
        return None
    if calibration is not None:
        raise UsageError(
            "static scales come from --data too, after scales are folded; leave --calibration and --stats out"
        )
    return replace(options, rounding=replace(options.rounding, kv_cache=kv_cache))


def _engine_names(checkpoint: Checkpoint, plan: QuantizationPlan) -> EngineNames:
    """Return the names in transformers of the modules that config.json lists.

    Quantized modules are listed only where there are several schemes, or for lm_head; routed experts by a pattern.
    """
    linears = [module for module in plan.modules if expert_group(module) is None]
    return engine_names(checkpoint, (*plan.kept, *linears))


def _constants(plan: QuantizationPlan) -> list[tuple[str, float]]:
    """Return the names and values of the scales that come from calibration, not from the source."""
    return [(constant.tensor.name, constant.value) for tensor in plan.tensors for constant in tensor.constants]


def _write_small_files(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    names: EngineNames,
    writer: CheckpointWriter,
    report: QuantizeReport,
    engines: Reports,
    base_model: str | None,
) -> None:
    """Write every file that is not a shard: tokenizer and other sidecars, index, report, model card and config."""
    write_sidecars(checkpoint, writer)
    if len(checkpoint.shards) > 1:
        shards = {shard: [output for tensor in group for output in tensor.outputs] for shard, group in plan.by_shard()}
        write_index(writer, shards)
    kept = (*plan.kept, *names.unlisted, *kept_experts(plan, family_of(checkpoint.config)))
    quantization = plan.layout.quantization_config(plan.modules, kept, plan.kv, names.others)
    config = quantized_model_config(checkpoint.config, plan.layout, quantization)
    writer.write_file(REPORT_FILE, encode_json(report.to_dict()))
    card = model_card(checkpoint, report, engines, base_model)
    writer.write_file(CARD_FILE, card.encode())
    writer.write_file(CONFIG_FILE, encode_json(config))


@dataclass
class QuantizeJob(RewriteJob[TensorPlan]):
    """One run of `quantize_checkpoint` over all shards.

    Attributes:
        rounded: The output tensors that were made with data; None: there are none.
    """

    plan: QuantizationPlan
    caster: Caster
    rounded: RoundedOutput | None = None
    amaxes: dict[str, float] = field(default_factory=dict, init=False)
    copied: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounded is None and isinstance(self.checkpoint, DecodedCheckpoint):
            self.copied = copied_codes(self.checkpoint, self.plan)

    def sources(self, item: TensorPlan) -> Sequence[TensorInfo]:
        """Return the one source tensor."""
        return (item.source,)

    def outputs(self, item: TensorPlan) -> Sequence[OutputTensor]:
        """Return the codes, scales and constants, or the copy."""
        return item.outputs

    def digests(self, item: TensorPlan) -> dict[str, Future[str]]:
        """Hash the rows of each weight, or the tensor that is copied."""
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
            if item.dtype is not None and isinstance(self.checkpoint, DecodedCheckpoint):
                return [self.pool.submit(dequantize_copy, self.checkpoint, item.source, item.dtype, shard)]
            return [self.pool.submit(copy_tensor, self.checkpoint, item.source, shard, self.caster)]
        return [self._submit_part(item.source, part, shard) for part in item.parts]

    def _submit_part(self, source: TensorInfo, part: Part, shard: ShardWriter) -> Future[Any]:
        """Hand one weight to the pool: its codes that were chosen with data, or its cast."""
        if self.rounded is not None and part.tensors.codes.name in self.rounded.model:
            return self.pool.submit(write_rounded_part, self.checkpoint, source, part, shard, self.rounded.model)
        if part.module in self.copied and isinstance(self.checkpoint, DecodedCheckpoint):
            return self.pool.submit(copy_codes, self.checkpoint, source, part, shard)
        amax = self.amaxes.get(part.group)
        return self.pool.submit(quantize_part, self.checkpoint, source, part, amax, shard, self.caster)

    def entries(self, item: TensorPlan, results: list[Any]) -> list[dict[str, Any]]:
        """Return a row for each weight, or one for the copy."""
        source_bytes = self.checkpoint.stored_bytes(item.source)
        if not item.parts:
            changed = self.rounded is not None and item.source.name in self.rounded.model
            return [TensorReport.copied(item, source_bytes, results[0], changed=changed).to_dict()]
        return [
            TensorReport.quantized(item, part, source_bytes, stats, digest, copied=part.module in self.copied).to_dict()
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
