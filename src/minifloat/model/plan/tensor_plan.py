"""`QuantizationPlan`: every name, shape and offset of the output, and how much of the linear weights it quantizes.

Little is usually quantized of a model whose names the general rules do not know; `require_share` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minifloat.checkpoint import OutputTensor, TensorInfo
from minifloat.errors import UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.layouts import WeightTensors, WriteLayout
from minifloat.model.plan.overrides import Override
from minifloat.numerics.scheme import KVSpec, Scheme
from minifloat.report.text import layer_pattern, size_text

#: Suffix of key projections; the KV scales of an attention module are written beside its key projection.
_KEY_PROJECTION = ".k_proj"
#: Reason for copying a tensor.
MTP = "multi-token prediction"


def module_name(info: TensorInfo) -> str:
    return info.name.removesuffix(".weight")


@dataclass(frozen=True)
class Part:
    """A weight ``[N, K]`` of the output that comes from a source tensor."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: WeightTensors
    group: str
    matrix: int = 0
    first_row: int = 0
    transposed: bool = False  #: the source stores ``[K, rows]``
    matrices: int = 1


@dataclass(frozen=True)
class Constant:
    """A float32 scale from calibration that is written beside a weight."""

    tensor: OutputTensor
    value: float


@dataclass(frozen=True)
class TensorPlan:
    """The output of one source tensor: its parts, or a copy if it has no parts."""

    source: TensorInfo
    role: Role
    parts: tuple[Part, ...] = ()
    reason: str = ""
    constants: tuple[Constant, ...] = ()
    drafts: bool = False
    dtype: str | None = None  #: of a copy whose source is quantized

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        constants = tuple(constant.tensor for constant in self.constants)
        if not self.parts:
            return (OutputTensor(self.source.name, self.dtype or self.source.dtype, self.source.shape), *constants)
        return (*(tensor for part in self.parts for tensor in part.tensors.all), *constants)


@dataclass(frozen=True)
class QuantizationPlan:
    """The plan of a whole checkpoint."""

    scheme: Scheme
    layout: WriteLayout
    overrides: tuple[Override, ...]
    tensors: tuple[TensorPlan, ...]
    kept: tuple[str, ...] = ()
    kv: KVSpec | None = None

    @property
    def modules(self) -> dict[str, Scheme]:
        return {part.module: part.scheme for tensor in self.tensors for part in tensor.parts}

    @property
    def static_modules(self) -> tuple[str, ...]:
        """The modules whose scheme needs a static scale of their input."""
        return tuple(
            module
            for module, scheme in self.modules.items()
            if scheme.activation is not None and scheme.activation.needs_calibration
        )

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """The attention modules: the modules with a key projection."""
        names = (
            module_name(tensor.source) for tensor in self.tensors if tensor.role is Role.LINEAR and not tensor.drafts
        )
        return tuple(name.removesuffix(_KEY_PROJECTION) for name in names if name.endswith(_KEY_PROJECTION))

    def with_scales(
        self, inputs: Mapping[str, float], kv: KVSpec | None, kv_scales: Mapping[str, tuple[float, float]]
    ) -> QuantizationPlan:
        def constants(tensor: TensorPlan) -> tuple[Constant, ...]:
            scales = [
                Constant(self.layout.input_scale(part.module, part.scheme.weight), inputs[part.module])
                for part in tensor.parts
                if part.module in inputs
            ]
            attention = module_name(tensor.source).removesuffix(_KEY_PROJECTION)
            if attention != module_name(tensor.source) and attention in kv_scales:
                pairs = zip(self.layout.kv_scales(attention), kv_scales[attention], strict=True)
                scales += [Constant(output, value) for output, value in pairs]
            return tuple(scales)

        tensors = tuple(replace(tensor, constants=constants(tensor)) for tensor in self.tensors)
        return replace(self, tensors=tensors, kv=kv)

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, headers not counted."""
        return sum(output.nbytes for tensor in self.tensors for output in tensor.outputs)

    def by_shard(self) -> Iterator[tuple[str, list[TensorPlan]]]:
        """Yield each source shard with the plans of its tensors, in order; the output has the same shards."""
        shards: dict[str, list[TensorPlan]] = {}
        for tensor in self.tensors:
            shards.setdefault(tensor.source.shard, []).append(tensor)
        yield from shards.items()


#: Share of the linear weights below which `require_share` refuses a plan.
SMALLEST = 0.5
_MATRIX = 2
_NOT_LINEAR = (Role.EMBEDDING, Role.LM_HEAD, Role.TOWER, Role.VECTOR)


@dataclass(frozen=True)
class KeptWeights:
    """Linear weights that keep the model's precision for one reason."""

    reason: str
    count: int
    elements: int
    nbytes: int
    example: str
    asked: bool

    def __str__(self) -> str:
        """Return one phrase with reason, number and size."""
        tensors = "tensor" if self.count == 1 else "tensors"
        return f"{self.reason}: {self.count} {tensors} of {size_text(self.nbytes)}, as {self.example}"


@dataclass(frozen=True)
class QuantizedShare:
    """The quantized part of a model's linear weights, in parameters."""

    quantized: int
    total: int
    kept: tuple[KeptWeights, ...]

    @classmethod
    def of(cls, plan: QuantizationPlan) -> QuantizedShare:
        asked = {str(override) for override in plan.overrides}
        quantized = total = 0
        kept: dict[str, list[TensorPlan]] = {}
        for tensor in plan.tensors:
            if tensor.role in _NOT_LINEAR or len(tensor.source.shape) < _MATRIX:
                continue
            elements = math.prod(tensor.source.shape)
            total += elements
            if tensor.parts:
                quantized += elements
            else:
                kept.setdefault(tensor.reason, []).append(tensor)
        groups = [_kept(reason, tensors, asked=reason in asked) for reason, tensors in kept.items()]
        return cls(quantized, total, tuple(sorted(groups, key=lambda group: -group.elements)))

    @property
    def fraction(self) -> float:
        return self.quantized / self.total if self.total else 0.0

    @property
    def unasked_fraction(self) -> float:
        """The share that is quantized of all that no override keeps, 0 .. 1."""
        total = self.total - sum(group.elements for group in self.kept if group.asked)
        return self.quantized / total if total else 0.0

    def __str__(self) -> str:
        return f"{_percent(self.fraction)} of the linear weights are quantized"

    def to_dict(self) -> dict[str, Any]:
        return {
            "quantized": self.quantized,
            "total": self.total,
            "kept": [
                {"reason": group.reason, "tensors": group.count, "elements": group.elements, "bytes": group.nbytes}
                for group in self.kept
            ],
        }


def _kept(reason: str, tensors: list[TensorPlan], *, asked: bool) -> KeptWeights:
    infos = [tensor.source for tensor in tensors]
    elements, nbytes = sum(math.prod(info.shape) for info in infos), sum(info.nbytes for info in infos)
    return KeptWeights(reason, len(infos), elements, nbytes, layer_pattern(infos[0].name), asked)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def require_share(plan: QuantizationPlan) -> None:
    """Refuse a plan that quantizes less than half of a model's linear weights, not counting those kept by overrides."""
    share = QuantizedShare.of(plan)
    if share.unasked_fraction >= SMALLEST:
        return
    left = "; ".join(str(group) for group in share.kept if not group.asked)
    raise UsageError(
        f"only {_percent(share.unasked_fraction)} of the linear weights would be quantized, by parameters, without "
        f"embeddings and lm_head; the rest keeps its precision ({left}). --override 'REGEX=SCHEME' quantizes matrices, "
        "fused experts need a description of their family (minifloat.model.architecture.families); "
        "--allow-partial accepts this"
    )
