"""`convert_checkpoint`: write the same weights in another layout, or decoded, with a few slabs in memory at a time.

The plan is made first, and refuses whatever cannot be converted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from minifloat._version import __version__
from minifloat.checkpoint import CONFIG_FILE, Checkpoint, CheckpointWriter, OutputTensor, TensorInfo
from minifloat.checkpoint.files import name_digest, new_hasher
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.rewrite import (
    CARD_FILE,
    REPORT_FILE,
    RewriteJob,
    encode_json,
    fingerprint,
    record_check,
    refuse_inside,
    restart_notes,
    worker_pool,
    write_index,
    write_sidecars,
)
from minifloat.checkpoint.shard import ShardWriter
from minifloat.deploy.check.document import MODEL
from minifloat.deploy.check.judge import Reports, engine_verdicts
from minifloat.errors import NonFiniteError, UsageError
from minifloat.kernels import processors
from minifloat.model.layouts import gguf as gguf_layout
from minifloat.model.layouts.reading import read_scales, widen
from minifloat.model.layouts.stored import scale_rule_of
from minifloat.numerics.scheme import SCALE_RULE
from minifloat.quantize.convert.document import model_card
from minifloat.quantize.convert.layout_plan import make_layout_plan, reciprocal
from minifloat.quantize.convert.mlx_plan import fold_of
from minifloat.quantize.convert.plan import (
    TENSOR_ROW,
    Change,
    Conversion,
    ConvertedTensor,
    ConvertPlan,
    ConvertReport,
    check_output,
    make_dequantize_plan,
    warnings_of,
)
from minifloat.quantize.nonfinite import Copied, nonfinite_detail, nonfinite_notes, tensors_allowed
from minifloat.quantize.options import ConvertOptions, GgufOptions
from minifloat.quantize.provenance import provenance
from minifloat.quantize.stream import chunks, copy_digest, copy_tensor, write_decoded

_ACTIONS = {Change.KEEP: "copied", Change.DROP: "dropped"}


def convert_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    layout: str | None = None,
    options: ConvertOptions | None = None,
    *,
    gguf: GgufOptions | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> ConvertReport:
    """Write a quantized checkpoint in another layout, code for code, or dequantized.

    Codes and scales keep their values exactly, or the conversion is refused before anything is written; scales of 16
    bits become float32. Dequantized weights are those of `layouts.read_weight(...).dequantize(dtype)`, bit for bit.

    Args:
        source: A folder or a model of the hub, in any layout that `layouts.describe` reads.
        destination: A folder that does not exist yet, in one that does. For gguf the file, or a folder for it.
        layout: A name of `layouts.TARGETS`, or gguf; None with `options.dequantize`.
        options: Whether to dequantize, and all else; `ConvertOptions` describes them.
        gguf: Types in a GGUF file; a model that is not quantized can be written too.
        progress: Called from this thread as work completes.
        announce: Called before anything is written with each note on engines that will answer wrongly.

    Raises:
        UsageError: An argument is wrong; nothing was written.
        ConversionError: The layout cannot hold the checkpoint without loss; nothing was written.
        CheckpointError: The source is damaged, or is no checkpoint.
        HubError: The hub has no such source, refuses it, or cannot be reached.
        TensorError: A tensor holds NaN or Inf; it is named and nothing is left behind.
        StorageError: The system refused to read or write; the work folder stays, and the same call continues.
    """
    _check(layout, options := options or ConvertOptions())
    with Checkpoint.open(model_folder(source, revision=options.revision)) as checkpoint:
        refuse_inside(checkpoint.path, Path(destination))
        return convert_opened(
            checkpoint, str(source), destination, layout, options, gguf=gguf, progress=progress, announce=announce
        )


def convert_opened(
    checkpoint: Checkpoint,
    source: str,
    destination: str | os.PathLike[str],
    layout: str | None,
    options: ConvertOptions,
    *,
    gguf: GgufOptions | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> ConvertReport:
    """Convert a checkpoint that is open, whose name for the report is `source`."""
    started = time.perf_counter()
    if layout == gguf_layout.NAME:
        gguf_layout.require_package()
        from minifloat.quantize.convert.gguf_file import write_gguf

        return write_gguf(checkpoint, source, Path(destination), options, gguf or GgufOptions(), progress)
    if layout is None:
        plan = make_dequantize_plan(checkpoint, options.dtype)
    else:
        plan = make_layout_plan(checkpoint, layout, allow_rounding=options.allow_rounding)
    allowed = tensors_allowed(checkpoint, options.allow_nonfinite)
    engines = check_output(checkpoint, plan, MODEL)
    for warning in (warnings := tuple(warnings_of(engine_verdicts(engines)))):
        if announce is not None:
            announce(warning)
    with CheckpointWriter(
        destination,
        fingerprint=fingerprint(checkpoint, plan.facts()),
        total_bytes=plan.output_bytes,
        overwrite=options.overwrite,
        check_record=record_check(TENSOR_ROW),
    ) as writer:
        with worker_pool(processors.workers(options.workers), writer) as pool:
            job = ConvertJob(checkpoint, writer, pool, dict(plan.by_shard()), _metadata(checkpoint), progress, allowed)
            rows = {row["name"]: ConvertedTensor(**row) for row in job.run()}
            tensors = tuple(rows[name] for name in checkpoint.tensors)
        report = replace(
            _report(checkpoint, plan, tensors, (*warnings, *_allowed_notes(tensors), *restart_notes(writer))),
            source=source,
            destination=str(destination),
            engines=engine_verdicts(engines),
            seconds=time.perf_counter() - started,
            resumed_shards=job.resumed,
        )
        _write_small_files(checkpoint, plan, writer, report, engines)
        writer.commit()
    return report


def _check(layout: str | None, options: ConvertOptions) -> None:
    if (layout is None) != options.dequantize:
        raise UsageError("give either a layout to convert to, or dequantize")
    if options.dtype is not None and not options.dequantize:
        raise UsageError("dtype needs dequantize: codes and scales keep their formats")
    processors.workers(options.workers)


def _report(
    checkpoint: Checkpoint, plan: ConvertPlan, tensors: tuple[ConvertedTensor, ...], notes: Sequence[str]
) -> ConvertReport:
    """Return what is known of a conversion without the run that made it."""
    target = f"--dequantize --dtype {plan.dtype}" if plan.layout is None else f"--layout {plan.layout.name}"
    options, layout = f"{target}{' --allow-rounding' if plan.rounding.scales else ''}", plan.source_layout
    return ConvertReport(
        source="",
        destination="",
        source_layout=layout,
        layout=None if plan.layout is None else plan.layout.name,
        dtype=plan.dtype,
        provenance=provenance(checkpoint, "convert", options, tensors, source_layout=layout),
        tensors=tensors,
        rounding=plan.rounding,
        notes=(*plan.notes, *notes),
    )


def _allowed_notes(tensors: Sequence[ConvertedTensor]) -> tuple[str, ...]:
    return nonfinite_notes((tensor.name, tensor.detail) for tensor in tensors)


def _write_small_files(
    checkpoint: Checkpoint, plan: ConvertPlan, writer: CheckpointWriter, report: ConvertReport, engines: Reports
) -> None:
    """Write every file that is not a shard: sidecars, index, files of the layout, report, model card and config."""
    write_sidecars(checkpoint, writer)
    if len(checkpoint.shards) > 1:
        shards = {shard: _outputs(conversions) for shard, conversions in plan.by_shard()}
        write_index(writer, {shard: outputs for shard, outputs in shards.items() if outputs})
    for name, content in plan.files.items():
        writer.write_file(name, encode_json(content))
    writer.write_file(REPORT_FILE, encode_json(report.to_dict()))
    writer.write_file(CARD_FILE, model_card(checkpoint, report, engines).encode())
    writer.write_file(CONFIG_FILE, encode_json(plan.config))


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the strings in the headers of files, with the rule of the scales where it is known."""
    rule = scale_rule_of(checkpoint)
    return {"format": "pt", "minifloat": __version__} | ({SCALE_RULE: rule} if rule else {})


@dataclass
class ConvertJob(RewriteJob[Conversion]):
    """One run of `convert_checkpoint` over all shards."""

    allowed: frozenset[str] = frozenset()  # tensors that may hold NaN or Inf

    def sources(self, item: Conversion) -> Sequence[TensorInfo]:
        return item.sources

    def outputs(self, item: Conversion) -> Sequence[OutputTensor]:
        return _outputs([item])

    def digests(self, item: Conversion) -> dict[str, Future[str]]:
        return {info.name: self.pool.submit(copy_digest, self.checkpoint, info) for info in item.sources}

    def submit(self, item: Conversion, shard: ShardWriter | None) -> list[Future[Any]]:
        return [self.pool.submit(run_conversion, self.checkpoint, item, shard, self.allowed)]

    def entries(self, item: Conversion, results: list[Any]) -> list[dict[str, Any]]:
        (copies,) = results
        action = _ACTIONS.get(item.change, "converted")
        changes = () if item.change in (Change.KEEP, Change.DROP, Change.MOVE) else (item.change.value,)
        reports = []
        for index, (info, copied) in enumerate(zip(item.sources, copies, strict=True)):
            output = item.output if index == 0 else None
            reports.append(
                ConvertedTensor(
                    name=info.name,
                    action=action,
                    detail=", ".join((item.detail if index == 0 or item.change is Change.MOVE else "scale", *changes))
                    + nonfinite_detail(copied.nonfinite),
                    becomes=None if output is None else output.name,
                    source_bytes=info.nbytes,
                    output_bytes=0 if output is None else output.nbytes,
                    source_digest=copied.digest,
                )
            )
        return [asdict(report) for report in reports]


def _outputs(conversions: Sequence[Conversion]) -> list[OutputTensor]:
    return [conversion.output for conversion in conversions if conversion.output is not None]


def run_conversion(
    checkpoint: Checkpoint, conversion: Conversion, shard: ShardWriter | None, allowed: Collection[str] = ()
) -> list[Copied]:
    info = conversion.sources[0]
    if shard is None or conversion.output is None:
        return [Copied(copy_digest(checkpoint, source)) for source in conversion.sources]
    if conversion.change is Change.KEEP:
        return [copy_tensor(checkpoint, info, shard, allowed=allowed)]
    if conversion.change is Change.DECODE:
        digests = [Copied(copy_digest(checkpoint, source)) for source in conversion.sources]
        write_decoded(checkpoint, conversion.matrices, conversion.output, shard, transposed=conversion.transposed)
        return digests
    if conversion.change is Change.INVERT:
        shard.write(conversion.output.name, reciprocal(checkpoint, info).value.reshape(1))
        return [Copied(copy_digest(checkpoint, info))]
    if conversion.change is Change.FOLD:
        _write_folded(checkpoint, conversion, conversion.output.name, shard)
        return [Copied(copy_digest(checkpoint, source)) for source in conversion.sources]
    end, digests = 0, []
    for source in conversion.sources:
        digest, end = _move(checkpoint, source, conversion, shard, end)
        digests.append(Copied(digest))
    return digests


def _write_folded(checkpoint: Checkpoint, conversion: Conversion, name: str, shard: ShardWriter) -> None:
    """Write the block scales of NVFP4 times those of their tensors."""
    end = 0
    for weight in conversion.matrices[0]:
        codes = fold_of(checkpoint, weight).codes[read_scales(checkpoint, weight, 0, weight.shape[0])]
        shard.write(name, codes.reshape(-1), end)
        end += codes.nbytes


def _move(
    checkpoint: Checkpoint, info: TensorInfo, conversion: Conversion, shard: ShardWriter, end: int
) -> tuple[str, int]:
    """Write the bytes of a tensor from byte `end` of the output on; return the source's digest and the new end."""
    assert conversion.output is not None
    name, widened, hasher = conversion.output.name, conversion.change is Change.WIDEN, new_hasher()
    for _, chunk in chunks(checkpoint, info):
        hasher.update(chunk)
        data = chunk
        if widened:
            floats = widen(chunk, info.dtype)
            nonfinite = np.count_nonzero(~np.isfinite(floats))
            if nonfinite:
                raise NonFiniteError(info.name, f"{nonfinite} scales are NaN or Inf; the checkpoint is damaged")
            data = floats.view(np.uint8)
        shard.write(name, data, end)
        end += data.nbytes
    return name_digest(hasher), end
