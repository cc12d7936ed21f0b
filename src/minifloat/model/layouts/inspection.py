"""`inspect`: a summary of the tensors of a checkpoint from its config and headers; no weights are read."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import open_headers
from minifloat.checkpoint.layout import is_gguf
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import role_of
from minifloat.model.layouts import Description, describe
from minifloat.model.layouts.gguf import require_package
from minifloat.model.layouts.stored import StoredWeight
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import SCHEMES, ActivationSpec, WeightSpec
from minifloat.report.document import ShortReport
from minifloat.report.text import size_text


@dataclass(frozen=True)
class TensorRow:
    """A row of the summary: one quantized weight or one other tensor."""

    name: str
    kind: str
    format: str
    shape: tuple[int, ...]
    elements: int
    nbytes: int


@dataclass(frozen=True, repr=False)
class Inspection(ShortReport):
    """Summary of a checkpoint.

    Attributes:
        path: The folder or the id of the hub, as the caller passed it.
        architecture: Architecture or model type from the config.
        layout: Name of the quantized layout, None for an unquantized checkpoint.
        kv_cache: Format of the KV cache; None if the checkpoint does not declare one.
        shards: Number of shards.
        rows: Quantized weights first, then the other tensors.
        ignored_files: Files of weights that the model does not use.
    """

    path: str
    architecture: str
    layout: str | None
    kv_cache: str | None
    shards: int
    rows: tuple[TensorRow, ...]
    ignored_files: tuple[str, ...] = field(default=())

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        return {
            "model": f"{self.path} ({self.architecture})",
            "layout": self.layout or "not quantized",
            "size": f"{size_text(self.nbytes)} in {self.shards} file(s)",
            "bits per weight": f"{self.bits_per_weight:.2f}",
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.nbytes for row in self.rows)

    @property
    def contents(self) -> str:
        """Bytes of each format, the largest first, and the number of files: what a machine has to hold."""
        sizes = ", ".join(f"{size_text(nbytes)} {name}" for name, (_, _, nbytes) in self.by("format").items())
        return f"{sizes} in {self.shards} file(s)"

    @property
    def elements(self) -> int:
        """Number of weights."""
        return sum(row.elements for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight over the whole checkpoint, including scales."""
        return 8 * self.nbytes / max(self.elements, 1)

    @property
    def quantized_bits_per_weight(self) -> float:
        """Bits of storage per weight over the quantized weights, including scales; NaN if there are none."""
        rows = [row for row in self.rows if row.kind == "quantized"]
        elements = sum(row.elements for row in rows)
        return 8 * sum(row.nbytes for row in rows) / elements if elements else math.nan

    def by(self, attribute: str) -> dict[str, tuple[int, int, int]]:
        """Return numbers of rows, weights and bytes by `kind` or `format`, sorted by bytes, largest first."""
        totals: dict[str, tuple[int, int, int]] = {}
        for row in self.rows:
            count, elements, nbytes = totals.get(getattr(row, attribute), (0, 0, 0))
            totals[getattr(row, attribute)] = (count + 1, elements + row.elements, nbytes + row.nbytes)
        return dict(sorted(totals.items(), key=lambda item: -item[1][2]))

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        bits = self.quantized_bits_per_weight
        return asdict(self) | {
            "nbytes": self.nbytes,
            "elements": self.elements,
            "bits_per_weight": self.bits_per_weight,
            "quantized_bits_per_weight": None if math.isnan(bits) else bits,
        }


def inspect_checkpoint(path: str | os.PathLike[str], *, revision: str | None = None) -> Inspection:
    """Describe a checkpoint.

    Args:
        path: A folder, a GGUF file, or the id of a model of the hub, whose weights are not downloaded.
        revision: Branch, tag or commit of a model of the hub; by default its default branch.

    Raises:
        CheckpointError: If a file is invalid.
        HubError: If the hub has no such model, refuses the request, or cannot be reached.
    """
    if is_gguf(os.fspath(path)) and Path(path).is_file():
        return _inspect_gguf(Path(path))
    with open_headers(path, revision=revision) as checkpoint:
        return inspect_opened(path, checkpoint, describe(checkpoint))


def _inspect_gguf(path: Path) -> Inspection:
    require_package()
    from minifloat.model.layouts.gguf.reading import EMBEDDING, number_in, read_header

    fields, tensors = read_header(path)
    rows = []
    for name, tensor in tensors.items():
        shape, format_ = tuple(int(extent) for extent in reversed(tensor.shape)), tensor.tensor_type.name
        kind = "quantized"
        if format_ in ("F32", "F16", "BF16"):
            kind = "unquantized linear" if len(shape) > 1 else Role.VECTOR.value
        kind = Role.EMBEDDING.value if name == EMBEDDING else kind
        rows.append(TensorRow(name, kind, format_, shape, math.prod(shape), int(tensor.n_bytes)))
    rows.sort(key=lambda row: row.kind != "quantized")
    name = fields["general.architecture"].contents() if "general.architecture" in fields else "unknown"
    return Inspection(str(path), str(name), "gguf", None, number_in(fields, "split.count", 1), tuple(rows))


def inspect_opened(path: str | os.PathLike[str], checkpoint: Checkpoint, description: Description) -> Inspection:
    """Return what `inspect_checkpoint` returns, for a checkpoint that is open and described already."""
    architectures = checkpoint.config.get("architectures") or [checkpoint.config.get("model_type", "unknown")]
    kv = description.kv
    return Inspection(
        path=str(path),
        architecture=str(architectures[0]),
        layout=description.layout,
        kv_cache=None if kv is None else f"{kv.element.name} per {kv.granularity}",
        shards=len(checkpoint.shards),
        rows=(*_quantized_rows(checkpoint, description), *_plain_rows(checkpoint, description)),
        ignored_files=tuple(checkpoint.ignored_files),
    )


def format_name(spec: WeightSpec, activation: ActivationSpec | None) -> str:
    """Return the name of the scheme with this storage format, or a description if there is no such scheme."""
    same_weight = [
        scheme
        for scheme in SCHEMES.values()
        if (scheme.weight.element, scheme.weight.granularity, scheme.weight.scale)
        == (spec.element, spec.granularity, spec.scale)
    ]
    for scheme in same_weight:
        if scheme.activation == activation:
            return scheme.name
    suffix = "" if activation is None else f", inputs {activation.element.name} per {activation.granularity}"
    if len(same_weight) == 1:
        weight_only = " (weight-only)" if activation is None else ""
        return f"{same_weight[0].name}{weight_only}{suffix}"
    scale = "" if spec.scale is FLOAT32 else f", {spec.scale.name} scales"
    return f"{spec.element.name} per {spec.granularity}{scale}{suffix}"


def _quantized_rows(checkpoint: Checkpoint, description: Description) -> list[TensorRow]:
    return [
        TensorRow(
            name=module,
            kind="quantized",
            format=format_name(stored.spec, stored.activation),
            shape=stored.shape,
            elements=math.prod(stored.shape),
            nbytes=_stored_bytes(checkpoint, stored),
        )
        for module, stored in description.weights.items()
    ]


def _stored_bytes(checkpoint: Checkpoint, stored: StoredWeight) -> int:
    """Return the bytes of a weight's tensors; for experts fused in one tensor, the share of one expert."""
    total = sum(checkpoint.tensors[name].nbytes for name in stored.tensors)
    return total if stored.expert is None else total // checkpoint.tensors[stored.codes].shape[0]


def _plain_rows(checkpoint: Checkpoint, description: Description) -> list[TensorRow]:
    used = {name for stored in description.weights.values() for name in stored.tensors}
    family = family_of(checkpoint.config)
    rows = []
    for name, info in checkpoint.tensors.items():
        if name in used:
            continue
        auxiliary = name in description.auxiliary
        role = role_of(info, family)
        kind = "scale" if auxiliary else ("unquantized linear" if role is Role.LINEAR else role.value)
        elements = 0 if auxiliary else math.prod(info.shape)
        rows.append(TensorRow(name, kind, info.dtype, info.shape, elements, checkpoint.stored_bytes(info)))
    return rows
