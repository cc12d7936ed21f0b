"""`QuantizationPlan`: every name, shape and offset of the output, so that threads may write in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from minifloat.checkpoint import OutputTensor, TensorInfo
from minifloat.model.architecture.family import Role
from minifloat.model.layouts import WeightTensors, WriteLayout
from minifloat.model.plan.overrides import Override
from minifloat.numerics.scheme import KVSpec, Scheme

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
