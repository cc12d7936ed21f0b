"""`convert_checkpoint`: the same weights in another layout, or in 16 bits, without ever holding the model.

The plan is made first, and all that stands in the way is refused there. Then tensors stream through a pool of threads,
shard by shard; each shard is synced and recorded, and the folder is renamed into place at the very end. An interrupted
run is taken up from its last complete shard, after the source tensors of the finished ones were hashed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minifloat._version import __version__
from minifloat.checkpoint import CONFIG_FILE, Checkpoint, CheckpointWriter, OutputTensor
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
from minifloat.convert.card import model_card
from minifloat.convert.plan import Change, ConvertPlan, Step, make_dequantize_plan, make_layout_plan
from minifloat.convert.report import ConvertedTensor, ConvertReport
from minifloat.convert.stream import run_step
from minifloat.errors import UsageError
from minifloat.hub import model_folder, model_name, origin_of
from minifloat.kernels import processors
from minifloat.quantize.stream import copy_digest
from minifloat.report.progress import Progress

_ACTIONS = {Change.KEEP: "copied", Change.DROP: "dropped"}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: str | None = None,
    *,
    dequantize: bool = False,
    dtype: str | None = None,
    allow_rounding: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    revision: str | None = None,
) -> ConvertReport:
    """Write a quantized checkpoint in another layout, code for code, or dequantized.

    Codes and scales keep their values exactly, or the conversion is refused before anything is written; scales of 16
    bits become float32. Dequantized weights are those of `layouts.read_weight(...).dequantize(dtype)`, bit for bit.

    Args:
        source: A folder or a model of the hub, in any layout that `layouts.describe` reads.
        destination: A folder that does not exist yet, in one that does.
        layout: A name of `layouts.TARGETS`.
        dequantize: Write plain weights instead.
        dtype: With `dequantize`: "bfloat16", "float16" or "float32"; by default that of config.json.
        allow_rounding: Round scales of NVFP4 whose reciprocal, which the other layout stores, is no float32.
        overwrite: Replace an existing destination, at the end.
        workers: Threads; by default one per core that this process may use, at most 8.
        progress: Called from this thread as work completes.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Returns:
        What became of every tensor.

    Raises:
        UsageError: The request is wrong; nothing was written.
        ConversionError: The layout cannot hold this without loss; nothing was written.
        CheckpointError: The source is not what it claims to be.
        HubError: The hub has no such source, refuses it, or cannot be reached.
        TensorError: A tensor holds NaN or Inf; it is named and nothing is left behind.
        StorageError: The system refused; the work folder stays, and the same call continues.
    """
    started = time.perf_counter()
    if (layout is None) != dequantize:
        raise UsageError("give either a layout to convert to, or dequantize")
    if dtype is not None and not dequantize:
        raise UsageError("a dtype goes with dequantize: codes keep theirs")
    threads = processors.workers(workers)
    with Checkpoint.open(model_folder(source, revision=revision)) as checkpoint:
        refuse_inside(checkpoint.path, Path(destination))
        if layout is None:
            plan = make_dequantize_plan(checkpoint, dtype)
        else:
            plan = make_layout_plan(checkpoint, layout, allow_rounding=allow_rounding)
        asked = {"convert": layout, "dtype": plan.dtype, "rounding": asdict(plan.rounding)}
        with CheckpointWriter(
            destination,
            fingerprint=fingerprint(checkpoint, asked),
            total_bytes=plan.output_bytes,
            overwrite=overwrite,
        ) as writer:
            with worker_pool(threads, writer) as pool:
                job = _Job(checkpoint, plan, writer, pool, progress)
                tensors = job.run()
            report = ConvertReport(
                source=str(source),
                destination=str(destination),
                source_layout=plan.source_layout,
                layout=layout,
                dtype=plan.dtype,
                provenance=_provenance(checkpoint, plan, tensors),
                tensors=tensors,
                rounding=plan.rounding,
                notes=(*plan.notes, *restart_notes(writer)),
                seconds=time.perf_counter() - started,
                resumed_shards=job.resumed,
            )
            _write_small_files(checkpoint, plan, writer, report)
            writer.commit()
    return report


def _provenance(checkpoint: Checkpoint, plan: ConvertPlan, tensors: Sequence[ConvertedTensor]) -> dict[str, Any]:
    """What the output was made from and with; the same for the same weights, however they were sharded."""
    target = f"--dequantize --dtype {plan.dtype}" if plan.layout is None else f"--layout {plan.layout.name}"
    rounding = " --allow-rounding" if plan.rounding.scales else ""
    origin = origin_of(checkpoint.path)
    source = checkpoint.path.name if origin is None else str(origin)
    return {
        "minifloat": __version__,
        "command": f"minifloat convert {source} OUT {target}{rounding}",
        "source": model_name(checkpoint.path),
        "source_revision": None if origin is None else origin.revision,
        "source_layout": plan.source_layout,
        "source_digest": combine((tensor.name, tensor.source_digest) for tensor in tensors),
    }


def _write_small_files(
    checkpoint: Checkpoint, plan: ConvertPlan, writer: CheckpointWriter, report: ConvertReport
) -> None:
    """Everything that is not a shard."""
    write_sidecars(checkpoint, writer)
    if len(checkpoint.shards) > 1:
        shards = {shard: _outputs(steps) for shard, steps in plan.by_shard()}
        write_index(writer, {shard: outputs for shard, outputs in shards.items() if outputs})
    for name, content in plan.files.items():
        writer.write_file(name, encode_json(content))
    writer.write_file(REPORT_FILE, encode_json(report.to_dict()))
    writer.write_file(CARD_FILE, model_card(checkpoint, report).encode())
    writer.write_file(CONFIG_FILE, encode_json(plan.config))


def _outputs(steps: Sequence[Step]) -> list[OutputTensor]:
    return [step.output for step in steps if step.output is not None]


@dataclass
class _Job:
    """One run over all shards."""

    checkpoint: Checkpoint
    plan: ConvertPlan
    writer: CheckpointWriter
    pool: ThreadPoolExecutor
    progress: Progress | None
    resumed: int = 0
    done_bytes: int = 0

    def run(self) -> tuple[ConvertedTensor, ...]:
        """Write every shard that is not finished; the reports of all tensors, in order."""
        shards = list(self.plan.by_shard())
        finished = ((shard, steps) for shard, steps in shards if shard in self.writer.finished)
        keep_what_stands(
            self.writer,
            {
                shard: [self.pool.submit(copy_digest, self.checkpoint, info) for step in steps for info in step.sources]
                for shard, steps in finished
            },
        )
        self.resumed = len(self.writer.finished)
        reports: dict[str, ConvertedTensor] = {}
        for name, steps in shards:
            outputs = _outputs(steps)
            if name in self.writer.finished:
                self._advance(steps)
            elif outputs:
                shard = self.writer.shard(name, outputs, {"format": "pt", "minifloat": __version__})
                done = self._do(steps, shard)
                shard.commit({"tensors": [asdict(one) for one in done]})
            else:
                reports |= {one.name: one for one in self._do(steps, None)}
        for record in self.writer.finished.values():
            reports |= {entry["name"]: ConvertedTensor(**entry) for entry in record["tensors"]}
        return tuple(reports[name] for name in self.checkpoint.tensors)

    def _do(self, steps: Sequence[Step], shard: ShardWriter | None) -> list[ConvertedTensor]:
        """Run the steps of one shard; the report of every tensor that they read."""
        pending = [(step, self.pool.submit(run_step, self.checkpoint, step, shard)) for step in steps]
        done = []
        for step, future in pending:
            done += _reports(step, future)
            self._advance([step])
        return done

    def _advance(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self.done_bytes += sum(info.nbytes for info in step.sources)
            if self.progress is not None:
                self.progress(self.done_bytes, self.plan.source_bytes, step.sources[0].name)


def _reports(step: Step, future: Future[list[str]]) -> list[ConvertedTensor]:
    action = _ACTIONS.get(step.change, "converted")
    changes = () if step.change in (Change.KEEP, Change.DROP, Change.MOVE) else (step.change.value,)
    reports = []
    for index, (info, digest) in enumerate(zip(step.sources, future.result(), strict=True)):
        output = step.output if index == 0 else None
        reports.append(
            ConvertedTensor(
                name=info.name,
                action=action,
                detail=", ".join((step.detail if index == 0 else "scale", *changes)),
                becomes=None if output is None else output.name,
                source_bytes=info.nbytes,
                output_bytes=0 if output is None else output.nbytes,
                source_digest=digest,
            )
        )
    return reports
