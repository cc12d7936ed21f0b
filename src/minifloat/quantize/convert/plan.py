"""`ConvertPlan`: the output of every tensor in a conversion, and what engines make of it.

A plan is made from headers and config.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.deploy.check.deployment import EngineVerdict, Reports, check_everywhere, others_that_load, short_name
from minifloat.deploy.check.subject import Subject
from minifloat.errors import ConversionError, UsageError
from minifloat.model.layouts import Description, StoredWeight, WriteLayout, describe
from minifloat.model.layouts.refusal import refuse_unknown_quantization
from minifloat.quantize.convert.report import Rounding


class Change(enum.Enum):
    """The change to the bytes of a tensor; the value is the text in reports."""

    KEEP = "not quantized"  #: same name, same bytes
    MOVE = "bytes as they are"  #: under the name and the shape of the target
    WIDEN = "widened to float32"
    INVERT = "reciprocal"
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
