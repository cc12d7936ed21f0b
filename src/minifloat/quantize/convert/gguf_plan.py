"""`make_gguf_plan`: the tensors of a GGUF file, and where each takes its values from; nothing but headers is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.tensors import DTYPES
from minifloat.errors import ConversionError, ShapeError
from minifloat.model.architecture.roles import EXPERTS
from minifloat.model.layouts import Description, StoredWeight
from minifloat.model.layouts.gguf.architectures import Architecture, architecture_of, rope_tensors
from minifloat.model.layouts.gguf.blocks import Blocks, blocks_of
from minifloat.model.layouts.gguf.places import Place, Places, Rows, row_axis
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.reading import read_codes, read_global_scale, read_rows, read_scales, widen
from minifloat.model.runtime.config import plain_config
from minifloat.quantize.convert.layout_plan import reciprocal
from minifloat.quantize.options import GgufOptions

Values = npt.NDArray[Any]
#: gguf's type of each plain dtype.
_PLAIN = {"BF16": "BF16", "F16": "F16", "F32": "F32"}
_DROPPED = ("rotary_emb.inv_freq",)
#: Prefixes of tensors of which llama.cpp reads float32 only: the routers of mixtures.
_FLOATS = ("ffn_gate_inp.",)
_ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Piece:
    """One matrix of a tensor of the file: rows of a weight, or of matrices of a plain tensor."""

    source: StoredWeight | TensorInfo
    place: Place
    transposed: bool = False  #: whether the plain tensor is stored ``[E, K, N]``

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors of the checkpoint, codes first."""
        source = self.source
        if isinstance(source, TensorInfo):
            return (source.name,)
        return tuple(name for name in source.tensors if name != source.input_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what the piece gives to the file."""
        shape = list(self.source.shape)
        if self.transposed:
            shape[-2:] = shape[:-3:-1]
        at = row_axis(tuple(shape), self.place.name)
        shape[at] = len(range(shape[at])[self.place.rows]) if isinstance(self.place.rows, slice) else shape[at]
        return tuple(shape)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file."""

    name: str
    type: str  #: the name of gguf's type
    pieces: tuple[Piece, ...] = ()
    constant: Values | None = None  #: the values of a tensor that comes from the config
    detail: str = ""
    blocks: Blocks | None = None  #: for codes and scales that are moved

    @property
    def shape(self) -> tuple[int, ...]:
        if self.constant is not None:
            return self.constant.shape
        first = self.pieces[0]
        return first.shape if first.place.expert is None else (len(self.pieces), *first.shape)

    @property
    def byte_shape(self) -> tuple[int, ...]:
        return gguf.quant_shape_to_byte_shape(self.shape, gguf.GGMLQuantizationType[self.type])

    @property
    def nbytes(self) -> int:
        return math.prod(self.byte_shape)


@dataclass(frozen=True)
class GgufPlan:
    """The plan of a whole file."""

    architecture: Architecture
    config: dict[str, Any]  #: of the text model, with all defaults
    description: Description
    tensors: tuple[FileTensor, ...]
    dropped: dict[str, str] = field(default_factory=dict)  #: tensors of the source, and why
    notes: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        """The type that holds most weights of the layers, which names the file."""
        totals: dict[str, int] = {}
        for tensor in self.tensors:
            if len(tensor.shape) > 1 and tensor.name not in _ENDS:
                totals[tensor.type] = totals.get(tensor.type, 0) + math.prod(tensor.shape)
        return max(totals, key=totals.__getitem__, default="F32")


def make_gguf_plan(
    checkpoint: Checkpoint, description: Description, options: GgufOptions, *, allow_rounding: bool = False
) -> GgufPlan:
    """Plan a file; raise an error, before anything is written, for what llama.cpp does not run."""
    row = architecture_of(checkpoint.config)
    config = plain_config(checkpoint).get_text_config(decoder=True).to_dict()
    planner = _Planner(checkpoint, description, row, config, options, allow_rounding)
    return GgufPlan(row, config, description, tuple(planner.tensors()), planner.dropped, tuple(planner.notes()))


class _Planner:
    """The tensors of one file."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        description: Description,
        row: Architecture,
        config: dict[str, Any],
        options: GgufOptions,
        allow_rounding: bool,
    ) -> None:
        self.checkpoint, self.description, self.row, self.config = checkpoint, description, row, config
        self.options, self.allow_rounding = options, allow_rounding
        self.places = Places(row, config)
        self.dropped: dict[str, str] = {}
        self.rounded = 0
        self.unlike: list[str] = []

    def tensors(self) -> Iterator[FileTensor]:
        by_name: dict[str, list[Piece]] = {}
        for piece in self._pieces():
            by_name.setdefault(piece.place.name, []).append(piece)
        for name, pieces in by_name.items():
            pieces.sort(key=lambda piece: piece.place.expert or 0)
            experts = [piece.place.expert for piece in pieces]
            if experts != [None] and experts != list(range(self._experts())):
                raise ConversionError(f"{name}: experts {experts} are not all of {self._experts()} experts, once each")
            tensor = self._tensor(name, tuple(pieces))
            yield tensor
            if tensor.blocks is not None and isinstance(pieces[0].source, StoredWeight):
                yield from self._scale(name, pieces)
        for name, values in rope_tensors(self.config).items():
            yield FileTensor(name, "F32", constant=values)

    def notes(self) -> Iterator[str]:
        if self.rounded:
            yield f"{self.rounded} global scales were rounded to float32."
        if self.unlike:
            yield (
                f"{len(self.unlike)} tensors of experts are stored in 16 bits or more, because one type holds all of a "
                f"layer, and some are not quantized alike: {self.unlike[0]}."
            )
        towers = sum(reason == "vision" for reason in self.dropped.values())
        if towers:
            yield f"{towers} tensors of the part that sees images are left out: the file holds the text model."

    def _experts(self) -> int:
        return next((int(self.config[name]) for name in EXPERTS if self.config.get(name)), 0)

    def _pieces(self) -> Iterator[Piece]:
        weights: dict[str, list[StoredWeight]] = {}
        for weight in self.description.weights.values():
            weights.setdefault(weight.codes, []).append(weight)
        used = {name for weight in self.description.weights.values() for name in weight.tensors}
        for name, info in self.checkpoint.tensors.items():
            if name in weights:
                for weight in weights[name]:
                    for place in self._places(f"{weight.module}.weight"):
                        yield Piece(weight, place)
            elif name in self.description.auxiliary or name.endswith(_DROPPED):
                self.dropped[name] = "belongs to the quantization"
            elif name == "lm_head.weight" and self.config.get("tie_word_embeddings"):
                self.dropped[name] = "tied to the embedding"
            elif self.places.is_tower(name):
                self.dropped[name] = "vision"
            elif name not in used:
                for place in self._places(name):
                    yield Piece(info, place, transposed=len(info.shape) == 3)
        for weight in self.description.weights.values():
            if weight.input_scale is not None:
                self.dropped[weight.input_scale] = "llama.cpp rounds inputs by rules of its own"

    def _places(self, name: str) -> tuple[Place, ...]:
        places = self.places.of(name)
        if not places:
            raise ConversionError(f"{name}: llama.cpp's {self.row.name.lower()} has no place for it")
        return places

    def _tensor(self, name: str, pieces: tuple[Piece, ...]) -> FileTensor:
        first = pieces[0]
        if any(piece.shape != first.shape for piece in pieces):
            raise ConversionError(f"{name}: its experts have different shapes, and one tensor holds them all")
        kinds = sorted({_kind(piece.source) for piece in pieces})
        source, cols = first.source, first.shape[-1]
        if len(kinds) > 1:
            kind = "F32" if {"F16", "F32"} & set(kinds) else "BF16"
            self.unlike.append(f"{name} ({', '.join(kinds)}) in {kind}")
            return FileTensor(name, kind, pieces, detail=f"from {' and '.join(kinds)}")
        if isinstance(source, StoredWeight):
            blocks = blocks_of(source.spec)
            if blocks is not None:
                if cols % blocks.elements:
                    raise ShapeError(
                        source.codes,
                        f"{cols} columns: llama.cpp's {blocks.name} has blocks of {blocks.elements}; keep the "
                        "module in 16 bits (--exclude) or quantize it to another format",
                    )
                return FileTensor(name, blocks.name, pieces, detail="codes and scales", blocks=blocks)
            return FileTensor(name, _in_blocks(self.options.fp8, cols), pieces, detail=f"from {kinds[0]}")
        if source.dtype not in _PLAIN:
            raise ConversionError(f"{source.name}: {source.dtype} has no type in a GGUF file")
        kind = _PLAIN[source.dtype]
        if len(first.shape) == 1 or "norm" in name or name.split(".", 2)[-1].startswith(_FLOATS) or ".bias" in name:
            kind = "F32"
        elif name in _ENDS and self.options.embedding is not None:
            kind = _in_blocks(self.options.embedding, cols)
        return FileTensor(name, kind, pieces, detail="not quantized")

    def _scale(self, name: str, pieces: list[Piece]) -> Iterator[FileTensor]:
        """Yield the tensor of global scales, by which llama.cpp multiplies outputs."""
        values = []
        for piece in pieces:
            weight = piece.source
            assert isinstance(weight, StoredWeight)
            if weight.global_scale is None:
                return
            info = self.checkpoint.tensors[weight.global_scale]
            value = read_global_scale(self.checkpoint, weight)
            assert value is not None
            if weight.global_divides:
                inverse = reciprocal(self.checkpoint, info)
                if inverse.change and not self.allow_rounding:
                    raise ConversionError(
                        f"{info.name}: llama.cpp multiplies by the global scale, and the reciprocal of {value} is no "
                        "float32; --allow-rounding accepts the nearest"
                    )
                self.rounded += bool(inverse.change)
                value = inverse.value
            values.append(value)
        yield FileTensor(name.removesuffix(".weight") + ".scale", "F32", constant=np.array(values, np.float32))


def _kind(source: StoredWeight | TensorInfo) -> str:
    return format_name(source.spec, None) if isinstance(source, StoredWeight) else source.dtype


def _in_blocks(kind: str, cols: int) -> str:
    """Return a type, or BF16 where rows do not fill its blocks."""
    name = kind.upper()
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return "BF16" if cols % block else name


@dataclass
class Error:
    """Squared values of weights, and squared errors of their types in the file."""

    values: float = 0.0
    errors: float = 0.0

    def add(self, exact: Values, stored: Values) -> None:
        self.values += float(np.sum(np.square(exact, dtype=np.float64)))
        self.errors += float(np.sum(np.square(exact - stored, dtype=np.float64)))

    def __str__(self) -> str:
        return f", SQNR {10 * math.log10(self.values / self.errors):.1f} dB" if self.errors else ""


def bytes_of(checkpoint: Checkpoint, tensor: FileTensor, check: Callable[[str, Values], None]) -> tuple[Values, Error]:
    """Return the bytes of a tensor in the shape of the file, uint8, and the error of rounded values.

    Args:
        checkpoint: The source.
        tensor: Of the plan.
        check: Called with the name of each plain tensor and its values.
    """
    kind, error = gguf.GGMLQuantizationType[tensor.type], Error()
    if tensor.constant is not None:
        return tensor.constant.view(np.uint8).reshape(tensor.byte_shape), error
    out = np.empty((len(tensor.pieces), *_one_expert(tensor)), np.uint8)
    for piece, part in zip(tensor.pieces, out, strict=True):
        source, rows = piece.source, piece.place.rows
        if isinstance(source, StoredWeight) and tensor.blocks is not None:
            codes = read_codes(checkpoint, source, 0, source.shape[0])
            scales = read_scales(checkpoint, source, 0, source.shape[0])
            part[...] = tensor.blocks.pack(codes[rows], scales[rows])
            continue
        if isinstance(source, StoredWeight):
            values = read_rows(checkpoint, source, 0, source.shape[0])[rows]
        else:
            plain = _plain(checkpoint, piece, rows)
            values = widen(plain.reshape(-1).view(np.uint8), source.dtype).reshape(plain.shape)
            check(source.name, values)
            if source.dtype == tensor.type and not piece.place.shift:
                part[...] = plain.view(np.uint8).reshape(part.shape)
                continue
        values = np.ascontiguousarray(values) + np.float32(piece.place.shift) if piece.place.shift else values
        stored = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        if isinstance(source, StoredWeight) or source.dtype != tensor.type:
            error.add(values, gguf.quants.dequantize(stored, kind))
        part[...] = np.ascontiguousarray(stored).view(np.uint8).reshape(part.shape)
    return out.reshape(tensor.byte_shape), error


def _one_expert(tensor: FileTensor) -> tuple[int, ...]:
    return tensor.byte_shape[1:] if tensor.pieces[0].place.expert is not None else tensor.byte_shape


def _plain(checkpoint: Checkpoint, piece: Piece, rows: Rows) -> Values:
    """Return a plain tensor as integers of its bits, its rows in the order of the file."""
    info = piece.source
    assert isinstance(info, TensorInfo)
    values: Values = checkpoint.read(info.name).view(f"u{DTYPES[info.dtype] // 8}").reshape(info.shape)
    if piece.transposed:
        values = values.swapaxes(-1, -2)
    return np.ascontiguousarray(values[:, rows] if row_axis(values.shape, piece.place.name) else values[rows])
