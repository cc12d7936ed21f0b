"""`write_gguf`: a checkpoint as a GGUF file, or several, with a tensor in memory at a time."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from gguf.gguf_writer import WriterState

from minifloat._version import __version__
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import digest_bytes, read_small, storage_errors, written_whole
from minifloat.checkpoint.hub import name_of
from minifloat.checkpoint.layout import OLLAMA_FILE, is_gguf
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.rewrite import CARD_FILE, fingerprint
from minifloat.checkpoint.writer import WORK_SUFFIX
from minifloat.deploy.check.document import DEPLOYMENT, MODEL
from minifloat.deploy.check.judge import check_everywhere
from minifloat.deploy.check.subject import Subject
from minifloat.errors import CheckpointError, DestinationError, NonFiniteError
from minifloat.model.layouts import Description, StoredWeight, describe
from minifloat.model.layouts.contradictions import refuse_unknown_quantization
from minifloat.model.layouts.gguf import NAME, PLAIN
from minifloat.model.layouts.gguf.architectures import write_hyperparameters
from minifloat.model.layouts.gguf.blocks import NVFP4
from minifloat.model.layouts.gguf.vocabulary import write_vocabulary
from minifloat.quantize.convert.document import model_card
from minifloat.quantize.convert.gguf_parts import Part, PartsWriter, padding
from minifloat.quantize.convert.gguf_plan import FileTensor, GgufPlan, bytes_of, make_gguf_plan
from minifloat.quantize.convert.modelfile import MARK, modelfile
from minifloat.quantize.convert.plan import ConvertedTensor, ConvertReport
from minifloat.quantize.nonfinite import tensors_allowed
from minifloat.quantize.options import ConvertOptions, GgufOptions
from minifloat.quantize.provenance import provenance
from minifloat.quantize.stream import HashedReads, copy_digest
from minifloat.report.markdown import markers

_SMALL = 1 << 24  #: bytes of a card or a Modelfile that are credible
#: Type of most weights -> the name of `gguf.LlamaFileType` that llama.cpp prints.
_FILE_TYPES = {"MXFP4": "MOSTLY_MXFP4_MOE", "F32": "ALL_F32"}


def write_gguf(
    checkpoint: Checkpoint,
    source: str,
    destination: Path,
    options: ConvertOptions,
    of_file: GgufOptions,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint, quantized or not, as a GGUF file.

    Args:
        checkpoint: The source, open.
        source: Its name, as the caller gave it.
        destination: The file, or the folder in which it is named after model and type.
        options: Of the conversion.
        of_file: Of the file.
        progress: Called with bytes done, bytes in total and the name of a tensor.

    Raises:
        UsageError: llama.cpp does not run the architecture, its rotary embedding or its tokenizer.
        ConversionError: A tensor has no place in the file, or a global scale no reciprocal.
        ShapeError: The rows of a weight do not fill the blocks of its type.
        DestinationError: The file exists.
        NonFiniteError: A tensor holds NaN or Inf.
    """
    started = time.perf_counter()
    description = describe(checkpoint)
    refuse_unknown_quantization(checkpoint, description)
    plan = make_gguf_plan(checkpoint, description, of_file, allow_rounding=options.allow_rounding)
    allowed = tensors_allowed(checkpoint, options.allow_nonfinite)
    header = _header(checkpoint, plan, of_file)
    parts = _parts(plan, header, _path(checkpoint, plan, destination), overwrite=options.overwrite)
    facts = [options.allow_nonfinite, *(digest_bytes(part.header).hex() for part in parts)]

    def check(name: str, values: Any) -> None:
        if name not in allowed and not np.isfinite(values).all():
            raise NonFiniteError(name, "it holds NaN or Inf; --allow-nonfinite PATTERN copies it nevertheless")

    done, total, hashed = 0, sum(tensor.nbytes for tensor in plan.tensors), HashedReads(checkpoint)
    with PartsWriter(parts, fingerprint(checkpoint, *facts), checkpoint) as writer:
        for at, tensor in enumerate(plan.tensors):
            if at >= writer.resumed:
                data, error = bytes_of(hashed, tensor, check)
                sources = [checkpoint.tensors[name] for piece in tensor.pieces for name in piece.tensors]
                detail = f"{tensor.type}: {tensor.detail}{error}"
                writer.add(tensor.name, data, detail, {info.name: hashed.digest(info) for info in sources})
            done += tensor.nbytes
            if progress is not None:
                progress(done, total, tensor.name)
        rows = _rows(checkpoint, plan, writer)
        layout = str(plan.description.layout or PLAIN)
        report = ConvertReport(
            source=source,
            destination=str(parts[0].path),
            source_layout=layout,
            layout=NAME,
            dtype=None,
            provenance=provenance(checkpoint, "convert", f"--layout {NAME}", rows, source_layout=layout),
            tensors=rows,
            notes=(*plan.notes, *_notes(parts, writer)),
            resumed_shards=writer.resumed,
        )
        if not is_gguf(destination.name):
            report = replace(report, notes=(*report.notes, *_write_beside(checkpoint, report, parts)))
        writer.commit()
    return replace(report, seconds=time.perf_counter() - started)


def _write_beside(checkpoint: Checkpoint, report: ConvertReport, parts: Sequence[Part]) -> Iterator[str]:
    """Write a Modelfile and a model card, unless there are others; yield notes."""
    text, note = modelfile(checkpoint, [part.path for part in parts])
    if note is not None:
        yield note
    subject = replace(Subject.of_checkpoint(checkpoint), layout=NAME)
    engines = {engine: reports for engine, reports in check_everywhere(subject, MODEL).items() if engine == "llama.cpp"}
    card = model_card(checkpoint, report, engines)
    for name, content, mark in ((OLLAMA_FILE, text, MARK), (CARD_FILE, card, markers(DEPLOYMENT)[0])):
        path = parts[0].path.with_name(name)
        if path.exists() and mark.encode() not in read_small(path.parent, name, _SMALL, CheckpointError):
            yield f"{path} is not of minifloat and stays as it is."
            continue
        with written_whole(path) as file:
            file.write(content.encode())


def _notes(parts: Sequence[Part], writer: PartsWriter) -> Iterator[str]:
    if len(parts) > 1:
        yield f"{len(parts)} files, of which llama.cpp is given the first."
    if writer.restarted_because is not None:
        yield f"An earlier, unfinished run was not continued: {writer.restarted_because}."


def check_model(checkpoint: Checkpoint, of_file: GgufOptions) -> None:
    """Raise what `write_gguf` raises for the model that a checkpoint stands for, before it is quantized."""
    _header(checkpoint, make_gguf_plan(checkpoint, Description(layout=None), of_file), of_file)


def _path(checkpoint: Checkpoint, plan: GgufPlan, destination: Path) -> Path:
    """Return the path of the file, and create its folder."""
    path = destination
    if not is_gguf(destination.name):
        name = name_of(checkpoint).rpartition("/")[2]
        name = re.sub(rf"[-_.]{plan.type}$", "", name, flags=re.IGNORECASE)
        path = destination / f"{name}-{plan.type}.gguf"
        with storage_errors(destination, "create the folder"):
            destination.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise DestinationError(f"{path.parent}: no such folder; create it first")
    return path


def _parts(plan: GgufPlan, writer: gguf.GGUFWriter, path: Path, *, overwrite: bool) -> list[Part]:
    """Return the files, none of which exists unless it may be replaced."""
    paths = [path]
    if len(writer.tensors) > 1:
        count = len(writer.tensors)
        paths = [
            path.with_name(gguf.SHARD_NAME_FORMAT.format(path.name[: -len(".gguf")], at + 1, count))
            for at in range(count)
        ]
    else:
        writer.split_max_size = 0
    if not (overwrite or paths[0].with_name(paths[0].name + WORK_SUFFIX).exists()):
        for existing in filter(Path.exists, paths):
            raise DestinationError(f"{existing} exists; --overwrite replaces it")
    files = [io.BytesIO() for _ in paths]
    writer.fout, writer.state = [cast(Any, file) for file in files], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    parts = []
    for name, file, tensors in zip(paths, files, writer.tensors, strict=True):
        header = file.getvalue() + padding(file.tell())
        size = len(header) + sum(info.nbytes + len(padding(info.nbytes)) for info in tensors.values())
        parts.append(Part(name, header, len(tensors), size))
    return parts


def _header(checkpoint: Checkpoint, plan: GgufPlan, options: GgufOptions) -> gguf.GGUFWriter:
    """Return a writer that has all but the bytes of tensors."""
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[plan.architecture.row], split_max_size=options.max_size or 0)
    write_hyperparameters(writer, plan.architecture, plan.config)
    write_vocabulary(writer, checkpoint.path, plan.architecture, plan.config, options.pre_tokenizer)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name_of(checkpoint))
    writer.add_quantized_by(f"minifloat {__version__}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_type = _FILE_TYPES.get(plan.type, f"MOSTLY_{plan.type}")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    for tensor in plan.tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, tensor.byte_shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind)
    wide = [tensor.name for tensor in plan.tensors if tensor.blocks is NVFP4 and not _quantizes_inputs(tensor)]
    if wide:  # without it, llama.cpp rounds their inputs to 4 bits where a GPU multiplies in NVFP4
        writer.add_array("general.tensor_extra.name", wide)
        writer.add_array("general.tensor_extra.prec_a4", [False] * len(wide))
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    return writer


def _quantizes_inputs(tensor: FileTensor) -> bool:
    return any(isinstance(piece.source, StoredWeight) and piece.source.activation for piece in tensor.pieces)


def _rows(checkpoint: Checkpoint, plan: GgufPlan, writer: PartsWriter) -> tuple[ConvertedTensor, ...]:
    """Return what became of each tensor of the source."""
    held: dict[str, dict[str, int]] = {}  # tensor of the source -> its bytes by tensor of the file
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            for at, name in enumerate(piece.tensors):
                share = 0 if at else tensor.nbytes // len(tensor.pieces)  # scales count with the codes
                by_tensor = held.setdefault(name, {})
                by_tensor[tensor.name] = by_tensor.get(tensor.name, 0) + share
    rows = []
    for name, info in checkpoint.tensors.items():
        places = held.get(name, {})
        rows.append(
            ConvertedTensor(
                name,
                "converted" if places else "dropped",
                writer.details[next(iter(places))] if places else plan.dropped[name],
                ", ".join(places) or None,
                info.nbytes,
                sum(places.values()),
                writer.sources.get(name) or copy_digest(checkpoint, info),
            )
        )
    return tuple(rows)
