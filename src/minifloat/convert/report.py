"""What `convert` did to every tensor: printed, and saved beside the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1  #: of the JSON that `ConvertReport.to_dict` gives


@dataclass(frozen=True)
class ConvertedTensor:
    """One tensor of the source.

    Attributes:
        name: Its name there.
        action: ``"converted"``, ``"copied"`` or ``"dropped"``.
        detail: How, or why.
        becomes: The tensor of the output that holds it; None where it was dropped, or decoded into another one's place.
        source_bytes: Before.
        output_bytes: After.
        source_digest: Content hash of the source's bytes, with its algorithm.
    """

    name: str
    action: str
    detail: str
    becomes: str | None
    source_bytes: int
    output_bytes: int
    source_digest: str


@dataclass(frozen=True)
class Rounding:
    """Scales whose reciprocal is no float32.

    Attributes:
        scales: How many were rounded.
        largest: Largest relative change of one.
    """

    scales: int = 0
    largest: float = 0.0


@dataclass(frozen=True)
class ConvertReport:
    """The result of `convert_checkpoint`.

    Attributes:
        source: Path of the source, as given.
        destination: Path of the output.
        source_layout: As `layouts.describe` names it.
        layout: Name of the layout that was written; None where the weights were dequantized.
        dtype: What they were dequantized to; None where a layout was written.
        provenance: What it was made from and with: hashes, versions, command.
        tensors: One entry per tensor of the source, in its order.
        rounding: What could not be carried over exactly; nothing unless it was allowed.
        notes: What a user should know, in sentences.
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
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    resumed_shards: int = field(default=0, compare=False)

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors before."""
        return sum(tensor.source_bytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors after."""
        return sum(tensor.output_bytes for tensor in self.tensors)

    def count(self, action: str) -> int:
        """How many tensors were ``"converted"``, ``"copied"`` or ``"dropped"``."""
        return sum(tensor.action == action for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: what is saved beside the weights. No times in it, so that equal runs write equal files."""
        return {
            "schema_version": SCHEMA_VERSION,
            "recipe": {"source_layout": self.source_layout, "layout": self.layout, "dtype": self.dtype},
            "provenance": self.provenance,
            "rounding": asdict(self.rounding),
            "notes": list(self.notes),
            "bytes": {"source": self.source_bytes, "output": self.output_bytes},
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }
