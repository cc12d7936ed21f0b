"""`write_gguf`: a checkpoint as one GGUF file, a tensor in memory at a time; renamed to its name when it is whole."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
from gguf.gguf_writer import WriterState

from minifloat._version import __version__
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import written_whole
from minifloat.checkpoint.hub import model_name
from minifloat.checkpoint.layout import is_gguf
from minifloat.checkpoint.progress import Progress
from minifloat.errors import DestinationError, NonFiniteError
from minifloat.model.layouts import StoredWeight, describe
from minifloat.model.layouts.contradictions import refuse_unknown_quantization
from minifloat.model.layouts.gguf import NAME
from minifloat.model.layouts.gguf.architectures import write_hyperparameters
from minifloat.model.layouts.gguf.blocks import NVFP4
from minifloat.model.layouts.gguf.vocabulary import write_vocabulary
from minifloat.quantize.convert.gguf_plan import FileTensor, GgufPlan, bytes_of, make_gguf_plan
from minifloat.quantize.convert.plan import ConvertedTensor, ConvertReport
from minifloat.quantize.nonfinite import tensors_allowed
from minifloat.quantize.options import ConvertOptions, GgufOptions
from minifloat.quantize.provenance import provenance
from minifloat.quantize.stream import copy_digest

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
    path = _path(checkpoint, plan, destination, options.overwrite)
    writer = _header(checkpoint, plan, of_file)
    allowed = tensors_allowed(checkpoint, options.allow_nonfinite)

    def check(name: str, values: Any) -> None:
        if name not in allowed and not np.isfinite(values).all():
            raise NonFiniteError(name, "it holds NaN or Inf; --allow-nonfinite PATTERN copies it nevertheless")

    details: dict[str, str] = {}
    done, total = 0, sum(tensor.nbytes for tensor in plan.tensors)
    with written_whole(path) as file:
        writer.fout, writer.state = [cast(Any, file)], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in plan.tensors:
            data, error = bytes_of(checkpoint, tensor, check)
            writer.write_tensor_data(data)
            details[tensor.name] = f"{tensor.type}: {tensor.detail}{error}"
            done += tensor.nbytes
            if progress is not None:
                progress(done, total, tensor.name)
    rows = _rows(checkpoint, plan, details)
    layout = str(plan.description.layout or "plain")
    return ConvertReport(
        source=source,
        destination=str(path),
        source_layout=layout,
        layout=NAME,
        dtype=None,
        provenance=provenance(checkpoint, "convert", f"--layout {NAME}", rows, source_layout=layout),
        tensors=rows,
        notes=plan.notes,
        seconds=time.perf_counter() - started,
    )


def _path(checkpoint: Checkpoint, plan: GgufPlan, destination: Path, overwrite: bool) -> Path:
    """Return the path of the file, and create its folder."""
    path = destination
    if not is_gguf(destination.name):
        name = model_name(checkpoint.path).rpartition("/")[2]
        name = re.sub(rf"[-_.]{plan.type}$", "", name, flags=re.IGNORECASE)
        path = destination / f"{name}-{plan.type}.gguf"
        destination.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise DestinationError(f"{path.parent}: no such folder; create it first")
    if path.exists() and not overwrite:
        raise DestinationError(f"{path} exists; --overwrite replaces it")
    return path


def _header(checkpoint: Checkpoint, plan: GgufPlan, options: GgufOptions) -> gguf.GGUFWriter:
    """Return a writer that has all but the bytes of tensors."""
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[plan.architecture.row])
    write_hyperparameters(writer, plan.architecture, plan.config)
    write_vocabulary(writer, checkpoint.path, plan.architecture, plan.config, options.pre_tokenizer)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model_name(checkpoint.path))
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


def _rows(checkpoint: Checkpoint, plan: GgufPlan, details: dict[str, str]) -> tuple[ConvertedTensor, ...]:
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
                details[next(iter(places))] if places else plan.dropped[name],
                ", ".join(places) or None,
                info.nbytes,
                sum(places.values()),
                copy_digest(checkpoint, info),
            )
        )
    return tuple(rows)
