"""The report of `convert` on every tensor, which is printed and saved beside the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from minifloat.checkpoint.schema import Check, exact_fields, natural, or_null, text
from minifloat.deploy.check.deployment import EngineVerdict
from minifloat.quantize.report import TensorsReport

#: Version of the JSON that `ConvertReport.to_dict` returns.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ConvertedTensor:
    """One tensor of the source."""

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
