"""`quantize_checkpoint`: a checkpoint in, a quantized checkpoint out, without ever holding the model.

The plan is made first; then shards are streamed through a bounded set of threads (the casts and the file system both
release the interpreter lock), each output shard is synced and recorded as soon as it is complete, and the folder is
renamed into place at the very end. An interrupted run is taken up from its last complete shard, after the source
files of the finished shards were hashed again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minifloat._version import __version__
from minifloat.check import require_loadable
from minifloat.check.subject import Subject
from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.checkpoint.digest import combine
from minifloat.checkpoint.rewrite import (
    CARD_FILE,
    REPORT_FILE,
    encode_json,
    fingerprint,
    keep_what_stands,
    refuse_inside,
    restart_notes,
    worker_pool,
    write_index,
    write_sidecars,
)
from minifloat.checkpoint.shard import ShardWriter
from minifloat.checkpoint.writer import CheckpointWriter
from minifloat.errors import UsageError
from minifloat.hub import is_hub_id, model_folder, model_name, origin_of
from minifloat.kernels import processors
from minifloat.layouts import compressed_tensors, get_writer
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.scheme import DEFAULT_SCHEME, Scheme, get_scheme
from minifloat.plan.quantization import Override, Plan, TensorPlan, make_plan
from minifloat.quantize.calibrated import Calibration, apply_calibration
from minifloat.quantize.card import model_card
from minifloat.quantize.report import QuantizeReport, TensorReport
from minifloat.quantize.stream import Caster, copy_digest, copy_tensor, part_amax, part_digest, quantize_part
from minifloat.report.progress import Progress

#: Shards that are open for writing at a time: one being synced while the next is computed.
_SHARDS_IN_FLIGHT = 2


def quantize_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    scheme: str | Scheme = DEFAULT_SCHEME,
    *,
    layout: str = compressed_tensors.NAME,
    overrides: Sequence[str | Override] = (),
    workers: int | None = None,
    overwrite: bool = False,
    calibration: Calibration | None = None,
    kv_cache: bool = False,
    target: str | None = None,
    device: str = "cpu",
    impl: str = "auto",
    progress: Progress | None = None,
    revision: str | None = None,
    base_model: str | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint into a new folder.

    Args:
        source: A folder or a model of the hub: Hugging Face layout, safetensors, BF16 / F16 / F32 weights.
        destination: A folder that does not exist yet, in one that does.
        scheme: A name of `SCHEMES`, or a `Scheme`.
        layout: A name of `layouts.WRITERS`.
        overrides: ``REGEX=SCHEME`` or ``REGEX=bf16``; the last that matches a module wins.
        workers: Threads; by default one per core that this process may use, at most 8.
        overwrite: Replace an existing destination, at the end.
        calibration: Activation statistics and the rule that makes static scales of them.
        kv_cache: Write scales of an FP8 KV cache; needs `calibration`.
        target: Where it is to run, as in ``"vllm:h100:tp4"``: what will not load there is refused.
        device: Where weights are cast: "cpu", "cuda" or "cuda:N". The same bits either way; the sums of errors in the
            report differ by the order of summation.
        impl: Implementation of the cast: "auto", "cpu", "reference" or "triton", which is what CUDA devices run.
        progress: Called from this thread as work completes.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.
        base_model: For the model card: the source's id on the hub, where the source is a folder.

    Returns:
        What became of every tensor, with the error of every cast.

    Raises:
        UsageError: The request is wrong; nothing was written.
        CheckpointError: The source is not what it claims to be.
        HubError: The hub has no such source, refuses it, or cannot be reached.
        TensorError: A tensor cannot be quantized; it is named and nothing is left behind.
        NotCalibratedError: Calibration did not see a module that wants a static scale.
        SaturationError: More held-out text would saturate than is allowed.
        KernelUnavailable: `device` or `impl` cannot cast here.
        StorageError: The system refused; the work folder stays, and the same call continues.
    """
    started = time.perf_counter()
    chosen = get_scheme(scheme) if isinstance(scheme, str) else scheme
    writer_layout = get_writer(layout)
    parsed = [item if isinstance(item, Override) else Override.parse(item) for item in overrides]
    caster = Caster.of(device, impl)
    threads = processors.workers(workers)
    if base_model is not None and not is_hub_id(base_model):
        raise UsageError(f"base_model: expected the id of a model of the hub, ORG/NAME, got {base_model!r}")
    with Checkpoint.open(model_folder(source, revision=revision)) as checkpoint:
        refuse_inside(checkpoint.path, Path(destination))
        plan = make_plan(checkpoint, chosen, writer_layout, parsed)
        caster.require(dict.fromkeys([plan.scheme, *plan.modules.values()]))
        plan, activations, notes = apply_calibration(plan, checkpoint, calibration, kv_cache=kv_cache)
        if target is not None:
            notes = (*notes, *require_loadable(checkpoint, plan, target))
        recipe = _recipe(plan, calibration)
        with CheckpointWriter(
            destination,
            fingerprint=fingerprint(checkpoint, recipe, _constants(plan)),
            total_bytes=plan.output_bytes,
            overwrite=overwrite,
        ) as writer:
            with worker_pool(threads, writer) as pool:
                job = _Job(checkpoint, plan, writer, pool, caster, progress)
                tensors = job.run()
            report = QuantizeReport(
                source=str(source),
                destination=str(destination),
                recipe=recipe,
                provenance=_provenance(checkpoint, tensors, recipe),
                tensors=tensors,
                activations=activations,
                notes=(*notes, *restart_notes(writer)),
                seconds=time.perf_counter() - started,
                resumed_shards=job.resumed,
            )
            _write_small_files(checkpoint, plan, writer, report, base_model)
            writer.commit()
    return report


def _recipe(plan: Plan, calibration: Calibration | None) -> dict[str, Any]:
    """What was asked, as JSON: enough to do it again."""
    weight = plan.scheme.weight
    return {
        "scheme": plan.scheme.name,
        "calibration": None if calibration is None else calibration.to_dict(),
        "kv_cache": None if plan.kv is None else plan.kv.element.name,
        "layout": plan.layout.name,
        "element": weight.element.name,
        "granularity": str(weight.granularity),
        "scale": weight.scale.name,
        "scale_rule": weight.rule.value,
        "overrides": [str(override) for override in plan.overrides],
    }


def _constants(plan: Plan) -> list[tuple[str, float]]:
    """Scales that come from elsewhere than the source."""
    return [(c.tensor.name, c.value) for tensor in plan.tensors for c in tensor.constants]


def _provenance(checkpoint: Checkpoint, tensors: Sequence[TensorReport], recipe: dict[str, Any]) -> dict[str, Any]:
    """What the output was made from and with; the same for the same weights, however they were sharded."""
    overrides = "".join(f" --override '{override}'" for override in recipe["overrides"])
    layout = "" if recipe["layout"] == compressed_tensors.NAME else f" --layout {recipe['layout']}"
    calibration = "" if recipe["calibration"] is None else f" --stats STATS --rule {recipe['calibration']['rule']}"
    kv_cache = " --kv-cache fp8" if recipe["kv_cache"] else ""
    options = f"{layout}{overrides}{calibration}{kv_cache}"
    origin = origin_of(checkpoint.path)
    source = checkpoint.path.name if origin is None else str(origin)
    return {
        "minifloat": __version__,
        "command": f"minifloat quantize {source} OUT --scheme {recipe['scheme']}{options}",
        "source": model_name(checkpoint.path),
        "source_revision": None if origin is None else origin.revision,
        "source_digest": combine((tensor.name, tensor.source_digest) for tensor in tensors),
    }


def _write_small_files(
    checkpoint: Checkpoint, plan: Plan, writer: CheckpointWriter, report: QuantizeReport, base_model: str | None
) -> None:
    """Everything that is not a shard: config, index, tokenizer and the like, the report and the model card."""
    write_sidecars(checkpoint, writer)
    if len(checkpoint.shards) > 1:
        shards = {shard: [output for tensor in group for output in tensor.outputs] for shard, group in plan.by_shard()}
        write_index(writer, shards)
    config = checkpoint.config | {
        "quantization_config": plan.layout.quantization_config(plan.modules, plan.kept, plan.kv),
    }
    writer.write_file(REPORT_FILE, encode_json(report.to_dict()))
    card = model_card(checkpoint, report, Subject.of_plan(checkpoint, plan), base_model)
    writer.write_file(CARD_FILE, card.encode())
    writer.write_file(CONFIG_FILE, encode_json(config))


@dataclass
class _Job:
    """One run over all shards."""

    checkpoint: Checkpoint
    plan: Plan
    writer: CheckpointWriter
    pool: ThreadPoolExecutor
    caster: Caster
    progress: Progress | None
    resumed: int = 0
    done_bytes: int = 0

    def __post_init__(self) -> None:
        self.total_bytes = self.plan.source_bytes

    def run(self) -> tuple[TensorReport, ...]:
        """Write every shard that is not finished; the reports of all tensors, in order."""
        shards = list(self.plan.by_shard())
        finished = ((shard, tensors) for shard, tensors in shards if shard in self.writer.finished)
        keep_what_stands(self.writer, {shard: self._digests(tensors) for shard, tensors in finished})
        amaxes = self._group_amaxes(shards)
        if any(
            amaxes.get(group, amax) != amax for r in self.writer.finished.values() for group, amax in r["amax"].items()
        ):
            self.writer.start_over("layers that share a scale changed")
            amaxes = self._group_amaxes(shards)
        self.resumed = len(self.writer.finished)
        in_flight: deque[_OpenShard] = deque()
        for shard, group in shards:
            if shard in self.writer.finished:
                self._advance(sum(tensor.source.nbytes for tensor in group), shard)
                continue
            in_flight.append(self._start(shard, group, amaxes))
            if len(in_flight) >= _SHARDS_IN_FLIGHT:
                self._finish(in_flight.popleft())
        while in_flight:
            self._finish(in_flight.popleft())
        records = [self.writer.finished[shard] for shard, _ in shards]
        return tuple(TensorReport.from_dict(entry) for record in records for entry in record["tensors"])

    def _digests(self, tensors: Sequence[TensorPlan]) -> list[Future[str]]:
        """Of what a shard is made from, in the order of its record."""
        futures = []
        for tensor in tensors:
            futures += [self.pool.submit(part_digest, self.checkpoint, tensor.source, part) for part in tensor.parts]
            if not tensor.parts:
                futures.append(self.pool.submit(copy_digest, self.checkpoint, tensor.source))
        return futures

    # ------------------------------------------------------------------------------------------ one pass for amax

    def _group_amaxes(self, shards: Sequence[tuple[str, list[TensorPlan]]]) -> dict[str, float]:
        """The common amax of each group that shares a scale and has a member yet to be written."""
        unfinished = {
            part.group
            for shard, group in shards
            if shard not in self.writer.finished
            for tensor in group
            for part in tensor.parts
        }
        futures = [
            (part.group, self.pool.submit(part_amax, self.checkpoint, tensor.source, part, self.caster))
            for tensor in self.plan.tensors
            for part in tensor.parts
            if part.scheme.weight.needs_tensor_amax and part.group in unfinished
        ]
        amaxes: dict[str, float] = {}
        for group, future in futures:
            amaxes[group] = max(amaxes.get(group, 0.0), future.result())
            self._advance(0, "measuring amax")
        return amaxes

    def _amaxes_of(self, tensors: Sequence[TensorPlan], amaxes: dict[str, float]) -> dict[str, float]:
        return {part.group: amaxes[part.group] for t in tensors for part in t.parts if part.group in amaxes}

    # ------------------------------------------------------------------------------------------ one shard

    def _start(self, name: str, tensors: list[TensorPlan], amaxes: dict[str, float]) -> _OpenShard:
        """Open an output shard and hand its work to the pool."""
        outputs = [output for tensor in tensors for output in tensor.outputs]
        metadata = {"format": "pt", "minifloat": __version__, "scale_rule": self.plan.scheme.weight.rule.value}
        shard = self.writer.shard(name, outputs, metadata)
        work: list[tuple[TensorPlan, list[Future[tuple[CastStats, str]]] | Future[str]]] = []
        for tensor in tensors:
            info = tensor.source
            for constant in tensor.constants:
                shard.write(constant.tensor.name, np.float32(constant.value).reshape(1))
            if not tensor.parts:
                work.append((tensor, self.pool.submit(copy_tensor, self.checkpoint, info, shard, self.caster)))
                continue
            futures = [
                self.pool.submit(quantize_part, self.checkpoint, info, part, amaxes.get(part.group), shard, self.caster)
                for part in tensor.parts
            ]
            work.append((tensor, futures))
        return _OpenShard(shard, work, self._amaxes_of(tensors, amaxes))

    def _finish(self, shard: _OpenShard) -> None:
        """Wait for a shard's work and record it."""
        reports = []
        for tensor, pending in shard.work:
            if isinstance(pending, list):
                reports += [
                    TensorReport.quantized(tensor, part, *future.result())
                    for part, future in zip(tensor.parts, pending, strict=True)
                ]
            else:
                reports.append(TensorReport.copied(tensor, pending.result()))
            self._advance(tensor.source.nbytes, tensor.source.name)
        shard.writer.commit({"amax": shard.amaxes, "tensors": [report.to_dict() for report in reports]})

    def _advance(self, nbytes: int, message: str) -> None:
        self.done_bytes += nbytes
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes, message)


@dataclass
class _OpenShard:
    """A shard whose work is in the pool."""

    writer: ShardWriter
    work: list[tuple[TensorPlan, list[Future[tuple[CastStats, str]]] | Future[str]]]
    amaxes: dict[str, float]
