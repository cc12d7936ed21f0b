"""The interface of layouts that can be written: names and shapes of tensors, and the config that declares them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from minifloat.checkpoint import OutputTensor
from minifloat.errors import UsageError
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.scheme import KVSpec, Scheme, WeightSpec

#: For modules that have one name.
NO_NAMES: Mapping[str, Sequence[str]] = MappingProxyType({})
_SCALE_DTYPES: dict[ElementFormat, str] = {FLOAT32: "F32", E8M0: "U8", E4M3: "F8_E4M3"}


@dataclass(frozen=True)
class WeightTensors:
    """The tensors of one quantized weight."""

    codes: OutputTensor
    scale: OutputTensor
    global_scale: OutputTensor | None = None

    @property
    def all(self) -> tuple[OutputTensor, ...]:
        return (self.codes, self.scale) + (() if self.global_scale is None else (self.global_scale,))


def codes_tensor(name: str, spec: WeightSpec, shape: tuple[int, int]) -> OutputTensor:
    """Return the tensor of the codes of a weight ``[N, K]``: E2M1 as uint8 ``[N, K / 2]``, E4M3 as ``[N, K]``."""
    if spec.element is E2M1:
        return OutputTensor(name, "U8", (shape[0], shape[1] * E2M1.bits // 8))
    return OutputTensor(name, "F8_E4M3", shape)


def scale_tensor(name: str, spec: WeightSpec, shape: tuple[int, ...]) -> OutputTensor:
    """Return the tensor of the block scales: F32, U8 (E8M0) or F8_E4M3 in the shape that a layout stores."""
    return OutputTensor(name, _SCALE_DTYPES[spec.scale], shape)


def with_names(modules: Iterable[str], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Return modules, each followed by its further names, without repetition."""
    return list(dict.fromkeys(name for module in modules for name in (module, *names.get(module, ()))))


class WriteLayout(ABC):
    """A layout that can be written."""

    name: str
    global_divides: ClassVar[bool] = True  #: not multiplies, to dequantize
    only_experts_of: ClassVar[str | None] = None  #: model type whose fused experts are all that it holds
    cure: ClassVar[str] = ""  #: where it has no place for scales from calibration

    @abstractmethod
    def check(self, scheme: Scheme) -> None:
        """Raise UsageError if the layout does not support the scheme."""

    @abstractmethod
    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        """Return the tensors of a weight ``[N, K]``, or of `experts` that share them (`only_experts_of`)."""

    @abstractmethod
    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        """Return the `quantization_config`; `kept`: unquantized linears; `names`: what transformers calls modules."""

    def extra_files(
        self, modules: Mapping[str, Scheme], kept: Sequence[str], kv: KVSpec | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return further JSON files with the same facts, by name; by default config.json holds everything."""
        return {}

    def input_scale(self, module: str, weight: WeightSpec) -> OutputTensor:
        """Return the tensor of the static input scale of a linear; for NVFP4, of the global input scale."""
        raise UsageError(f"layout {self.name!r} has no static input scales ({module}); {self.cure}")

    def kv_scales(self, attention: str) -> tuple[OutputTensor, OutputTensor]:
        """Return the tensors of the scales of an attention module's keys and values."""
        raise UsageError(f"layout {self.name!r} cannot announce KV scales ({attention}); {self.cure}")

    def refuse_kv(self, kv: KVSpec | None) -> None:
        """Refuse a quantized KV cache, where the config of this layout has no key for it."""
        if kv is not None:
            raise UsageError(f"layout {self.name!r} cannot announce a quantized KV cache; {self.cure}")
