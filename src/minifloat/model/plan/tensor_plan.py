"""`QuantizationPlan` and its rows, one per tensor of a checkpoint.

The plan fixes every name, shape and offset of the output, so that threads may write in any order.
"""

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
    """Return the name of the module whose weight a tensor is."""
    return info.name.removesuffix(".weight")


@dataclass(frozen=True)
class Part:
    """A weight ``[N, K]`` of the output that comes from a source tensor.

    Attributes:
        module: Name of the linear in the output.
        scheme: Scheme that it is quantized to.
        shape: ``(N, K)``.
        tensors: Names, dtypes and shapes of its codes and scales in the output.
        group: Modules of one group share a scale if the scheme has one scale per tensor.
        matrix: Index of the matrix in the source, for fused experts; 0 otherwise.
        first_row: First row of this weight in that matrix (after transposing).
        transposed: Whether the source stores the matrix as ``[K, rows]``.
        matrices: Number of matrices that the weight takes from the source, one below the other (gpt-oss stores all
            experts in one tensor); then `shape` has the rows of all.
    """

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: WeightTensors
    group: str
    matrix: int = 0
    first_row: int = 0
    transposed: bool = False
    matrices: int = 1


@dataclass(frozen=True)
class Constant:
    """A float32 scale from calibration that is written beside a weight.

    Attributes:
        tensor: Name and shape in the output, one element.
        value: The scale.
    """

    tensor: OutputTensor
    value: float


@dataclass(frozen=True)
class TensorPlan:
    """The output of one source tensor: its parts, or a copy if it has no parts.

    Attributes:
        source: The source tensor.
        role: Its role in the model.
        parts: The quantized weights that it becomes; empty for a copy.
        reason: Why it is copied; empty where it is quantized.
        constants: Scales of inputs and of the KV cache that are written beside it.
        drafts: Whether it belongs to a layer of multi-token prediction.
        dtype: Dtype of the copy of a tensor that the source stores quantized; None: as it is stored.
    """

    source: TensorInfo
    role: Role
    parts: tuple[Part, ...] = ()
    reason: str = ""
    constants: tuple[Constant, ...] = ()
    drafts: bool = False
    dtype: str | None = None

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The output tensors."""
        constants = tuple(constant.tensor for constant in self.constants)
        if not self.parts:
            return (OutputTensor(self.source.name, self.dtype or self.source.dtype, self.source.shape), *constants)
        return (*(tensor for part in self.parts for tensor in part.tensors.all), *constants)


@dataclass(frozen=True)
class QuantizationPlan:
    """The plan of a whole checkpoint.

    Attributes:
        scheme: The scheme of modules that no override matches.
        layout: Layout of the output.
        overrides: Exceptions; the last override that matches a module decides.
        tensors: One entry per source tensor, in the source's order.
        kept: Linears that keep the model's precision, for the list of exceptions in the config.
        kv: How the KV cache is quantized; None: it is not quantized.
    """

    scheme: Scheme
    layout: WriteLayout
    overrides: tuple[Override, ...]
    tensors: tuple[TensorPlan, ...]
    kept: tuple[str, ...] = ()
    kv: KVSpec | None = None

    @property
    def modules(self) -> dict[str, Scheme]:
        """Quantized module -> its scheme."""
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
        """Return the plan with scales from calibration as constants.

        Args:
            inputs: Module of `static_modules` -> scale of its input, as the layout stores it.
            kv: How the KV cache is quantized, or None.
            kv_scales: Module of `attention_modules` -> scales of its keys and values; empty without `kv`.

        Raises:
            UsageError: The layout cannot hold these scales.
        """

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
