"""`ConvertPlan`: the output of every tensor in a conversion; the plan that decodes weights; and the report."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.schema import Check, exact_fields, natural, or_null, text
from minifloat.deploy.check.judge import EngineVerdict, Reports, check_everywhere, others_that_load, short_name
from minifloat.deploy.check.subject import Subject
from minifloat.errors import ConversionError, UsageError, lookup
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, SingleExpert
from minifloat.model.layouts import Description, StoredWeight, WriteLayout, describe
from minifloat.model.layouts.contradictions import refuse_unknown_quantization
from minifloat.model.layouts.decoded import DTYPES, config_dtype, language_configs, without_quantization
from minifloat.model.layouts.inspection import format_name
from minifloat.model.runtime.engine_names import stored_fused_as
from minifloat.quantize.report import TensorsReport

#: Version of the JSON that `ConvertReport.to_dict` returns.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ConvertedTensor:
    name: str
    action: str
    detail: str
    becomes: str | None  # the tensor of the output that holds it; None where it was dropped or merged
    source_bytes: int
    output_bytes: int
    source_digest: str  # content hash of the source's bytes, with its algorithm


#: Check of the fields of a `ConvertedTensor` as JSON values.
TENSOR_ROW: Check = exact_fields(
    {
        "name": text,
        "action": text,
        "detail": text,
        "becomes": or_null(text),
        "source_bytes": natural,
        "output_bytes": natural,
        "source_digest": text,
    }
)


@dataclass(frozen=True)
class Rounding:
    """Scales whose reciprocal is no float32 number."""

    scales: int = 0
    largest: float = 0.0


@dataclass(frozen=True, repr=False)
class ConvertReport(TensorsReport):
    """The result of `convert_checkpoint`.

    Attributes:
        source: Path of the source, as the caller gave it.
        destination: Path of the output.
        source_layout: Name of the source's layout, by `layouts.describe`.
        layout: Name of the layout that was written; None where the weights were dequantized.
        dtype: Dtype of dequantized weights; None where a layout was written.
        provenance: Source, hashes, versions and command.
        tensors: One entry per tensor of the source, in its order.
        rounding: Scales whose values changed; none unless rounding was allowed.
        engines: Which engines load the output on which machines, by `check`.
        notes: Sentences for the user.
        seconds: Wall time of this run.
        resumed_shards: Shards that an earlier, interrupted run had finished.
    """

    source: str
    destination: str
    source_layout: str
    layout: str | None
    dtype: str | None
    provenance: dict[str, Any]
    tensors: tuple[ConvertedTensor, ...]
    rounding: Rounding = field(default_factory=Rounding)
    engines: tuple[EngineVerdict, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    resumed_shards: int = field(default=0, compare=False)

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        return {
            "layout": f"{self.source_layout} -> {self.layout or self.dtype}",
            "tensors": str(len(self.tensors)),
            "written to": self.destination,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values that are saved beside the weights; without times, equal runs write equal files."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": {"source_layout": self.source_layout, "layout": self.layout, "dtype": self.dtype},
            "provenance": self.provenance,
            "rounding": asdict(self.rounding),
            "engines": [verdict.to_dict() for verdict in self.engines],
            "notes": list(self.notes),
            "bytes": {"source": self.source_bytes, "output": self.output_bytes},
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }


class Change(enum.Enum):
    """The change to the bytes of a tensor; the value is the text in reports."""

    KEEP = "not quantized"  #: same name, same bytes
    MOVE = "bytes as they are"  #: under the name and the shape of the target; several sources one after the other
    WIDEN = "widened to float32"
    INVERT = "reciprocal"
    FOLD = "with the tensor scale"  #: block scales of NVFP4, those of `matrices`
    DECODE = "dequantized"
    DROP = "dropped"


@dataclass(frozen=True)
class Conversion:
    """Source tensors, and the one output tensor that they become."""

    sources: tuple[TensorInfo, ...]
    output: OutputTensor | None  # the tensor that is written; None: nothing is written
    change: Change  # the change to the bytes
    detail: str
    matrices: tuple[tuple[StoredWeight, ...], ...] = ()
    transposed: bool = False  # for DECODE: whether each matrix is stored ``[K, N]``


@dataclass(frozen=True)
class ConvertPlan:
    """The plan of a whole checkpoint."""

    source_layout: str
    layout: WriteLayout | None  # the layout that is written; None: dequantized weights
    dtype: str | None  # dtype of dequantized weights, a key of `dequantize_plan.DTYPES`; None where a layout is written
    conversions: tuple[Conversion, ...]
    config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounding: Rounding = field(default_factory=Rounding)
    notes: tuple[str, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, headers not counted."""
        return sum(conversion.output.nbytes for conversion in self.conversions if conversion.output is not None)

    def facts(self) -> dict[str, Any]:
        """Return what determines the output besides the source, as JSON values."""
        layout = None if self.layout is None else self.layout.name
        return {"convert": layout, "dtype": self.dtype, "rounding": asdict(self.rounding)}

    def by_shard(self) -> Iterator[tuple[str, list[Conversion]]]:
        """Yield each source shard with its conversions, in order; the output has the same shards."""
        shards: dict[str, list[Conversion]] = {}
        for conversion in self.conversions:
            shards.setdefault(conversion.sources[0].shard, []).append(conversion)
        yield from shards.items()


def describe_quantized(checkpoint: Checkpoint) -> Description:
    """Describe a checkpoint that can be converted."""
    description = describe(checkpoint)
    if description.layout is None:
        raise UsageError(
            f"{checkpoint.path} is not quantized; `minifloat quantize` does that, in any layout it can hold"
        )
    refuse_unknown_quantization(checkpoint, description)
    return description


def with_copies(checkpoint: Checkpoint, conversions: Iterable[Conversion]) -> tuple[Conversion, ...]:
    """Return `conversions` and a copy of each tensor that none of them reads, in the order of the source."""
    by_first_source = {conversion.sources[0].name: conversion for conversion in conversions}
    converted = {info.name for conversion in by_first_source.values() for info in conversion.sources}
    ordered = []
    for name, info in checkpoint.tensors.items():
        if name in by_first_source:
            ordered.append(by_first_source[name])
        elif name not in converted:
            copy = OutputTensor(name, info.dtype, info.shape)
            ordered.append(Conversion((info,), copy, Change.KEEP, Change.KEEP.value))
    return tuple(ordered)


def require_tensor(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """Return a tensor of a quantized weight."""
    try:
        return checkpoint.tensors[name]
    except KeyError:
        raise ConversionError(f"{name} is missing: the weight cannot be decoded without it") from None


class PlannedCheckpoint(Checkpoint):
    """The config and the headers of a checkpoint that a plan writes; its tensors cannot be read."""

    def __init__(self, source: Checkpoint, plan: ConvertPlan) -> None:
        self.path, self.shards, self.metadata = source.path, source.shards, source.metadata
        self.ignored_files = ()
        self.config = plan.config
        self.quantization_config = plan.config.get("quantization_config")
        outputs = ((conversion.sources[0].shard, conversion.output) for conversion in plan.conversions)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {
                output.name: TensorInfo(output.name, output.dtype, output.shape, shard, 0, output.nbytes)
                for shard, output in outputs
                if output is not None
            }
        )


def check_output(source: Checkpoint, plan: ConvertPlan, model: str) -> Reports:
    """Return the report of every engine on every machine on the output of a plan."""
    return check_everywhere(Subject.of_checkpoint(PlannedCheckpoint(source, plan)), model)


def warnings_of(verdicts: tuple[EngineVerdict, ...]) -> Iterator[str]:
    """Yield a sentence for each engine that would answer wrongly, and one if only minifloat loads the output."""
    for verdict in verdicts:
        if verdict.wrong:
            cure = f"; {verdict.cure}" if verdict.cure else ""
            yield f"{short_name(verdict.engine)} loads the output and answers wrongly: {verdict.problem}{cure}."
    if not others_that_load(verdicts):
        yield "No engine but minifloat is known to load the output."


#: Experts of a fused tensor by index, and their linears by position among those that the tensor holds.
_Experts = dict[int, dict[int, StoredWeight]]


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor of the unquantized model."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[tuple[StoredWeight, ...], ...]
    transposed: bool = False  # whether each matrix is stored ``[K, N]``


def decoded_tensors(checkpoint: Checkpoint, description: Description) -> Iterator[DecodedTensor]:
    """Yield the tensors of the unquantized model."""
    family = family_of(checkpoint.config)
    fused: dict[str, list[StoredWeight]] = {}
    single: dict[tuple[str, str], _Experts] = {}
    places: dict[tuple[str, str], SingleExpert] = {}
    for weight in description.weights.values():
        if weight.expert is not None:
            fused.setdefault(weight.codes, []).append(weight)
            continue
        place = family.single_expert(weight.module)
        if place is None or family.stored_fused is False:
            yield DecodedTensor(f"{weight.module}.weight", weight.shape, ((weight,),))
            continue
        key = (place.parent, place.fused.name)
        places[key] = place
        single.setdefault(key, {}).setdefault(place.expert, {})[place.position] = weight
    for weights in fused.values():
        rows, cols = weights[0].shape
        name = weights[0].module.rpartition(".")[0]
        yield DecodedTensor(name, (len(weights), cols, rows), tuple((weight,) for weight in weights), transposed=True)
    transposed = stored_fused_as(checkpoint, family, places.values())
    square = _with_square(places, single)
    for key, experts in single.items():
        if transposed is None:
            for weight in (weight for parts in experts.values() for weight in parts.values()):
                yield DecodedTensor(f"{weight.module}.weight", weight.shape, ((weight,),))
        else:
            upright = places[key].fused.both_exist and key[0] in square
            yield _fused(places[key], experts, family, transposed and not upright)


def _with_square(
    places: Mapping[tuple[str, str], SingleExpert], single: Mapping[tuple[str, str], _Experts]
) -> frozenset[str]:
    """Return the parents of tensors of fused experts one of whose matrices is square."""
    parents = set()
    for key, experts in single.items():
        first = next(iter(next(iter(experts.values())).values()))
        if first.shape[0] * len(places[key].fused.linears) == first.shape[1]:
            parents.add(key[0])
    return frozenset(parents)


def _fused(
    place: SingleExpert, experts: Mapping[int, Mapping[int, StoredWeight]], family: Family, transposed: bool
) -> DecodedTensor:
    name = f"{place.parent}{place.fused.name}"
    positions = range(len(place.fused.linears))
    first = experts[min(experts)][min(experts[min(experts)])]
    rows, cols = first.shape
    for expert in range(max(experts) + 1):
        for position in positions:
            module = place.parent + place.fused.linears[position].format(expert)
            weight = experts.get(expert, {}).get(position)
            if weight is None:
                raise ConversionError(
                    f"{module} is not quantized, and other experts of {place.parent.rstrip('.')} are: {family.name} "
                    f"stores them in one tensor, {name}, which cannot be made of both; quantize all experts alike"
                )
            if weight.shape != first.shape:
                raise ConversionError(
                    f"{module} is {list(weight.shape)}, and {first.module} {list(first.shape)}: {name} cannot hold both"
                )
    matrices = tuple(tuple(experts[expert][position] for position in positions) for expert in range(len(experts)))
    height = rows * len(positions)
    shape = (len(experts), cols, height) if transposed else (len(experts), height, cols)
    return DecodedTensor(name, shape, matrices, transposed)


def make_dequantize_plan(checkpoint: Checkpoint, dtype: str | None = None) -> ConvertPlan:
    """Plan to write decoded weights."""
    description = describe_quantized(checkpoint)
    config = without_quantization(checkpoint.config)
    dtype_name = dtype or config_dtype(config)
    stored_dtype = lookup("dtype", dtype_name, DTYPES)
    if dtype is not None:
        _set_dtype(config, dtype)
    conversions = []
    for group in decoded_tensors(checkpoint, description):
        weights = [weight for matrix in group.matrices for weight in matrix]
        names = (name for weight in weights for name in weight.tensors if name != weight.input_scale)
        infos = tuple(require_tensor(checkpoint, name) for name in dict.fromkeys(names))
        output = OutputTensor(group.name, stored_dtype, group.shape)
        detail = f"from {format_name(weights[0].spec, weights[0].activation)}"
        conversions.append(Conversion(infos, output, Change.DECODE, detail, group.matrices, group.transposed))
        for scale in dict.fromkeys(weight.input_scale for weight in weights if weight.input_scale):
            info = checkpoint.tensors[scale]
            conversions.append(Conversion((info,), None, Change.DROP, "inputs are no longer quantized"))
    for name in description.auxiliary:
        conversions.append(Conversion((checkpoint.tensors[name],), None, Change.DROP, "belongs to the quantization"))
    return ConvertPlan(str(description.layout), None, dtype_name, with_copies(checkpoint, conversions), config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for part in language_configs(config):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
