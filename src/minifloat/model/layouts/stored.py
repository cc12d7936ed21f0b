"""The common description of quantized weights, into which every layout is translated from headers and config alone."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.errors import ConfigError, ShapeError, UnsupportedTensorError
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import CHANNEL, GROUP_16, GROUP_32, TENSOR, Granularity
from minifloat.numerics.scheme import SCALE_RULE, ActivationSpec, KVSpec, ScaleRule, WeightSpec

#: Format of stored scales by their safetensors dtype. 16-bit scales are converted to float32, which is exact.
SCALE_FORMATS: dict[str, ElementFormat] = {
    "F32": FLOAT32,
    "BF16": FLOAT32,
    "F16": FLOAT32,
    "U8": E8M0,
    "F8_E8M0": E8M0,
    "F8_E4M3": E4M3,
}

_KV_SCALE = re.compile(
    r"(?P<attention>.+?)(?:\.(?P<projection>[kv])_proj)?\.(?:(?P<scale>[kv])_scale|output_scale)",
)


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one quantized weight ``[N, K]`` in a checkpoint."""

    module: str
    spec: WeightSpec
    shape: tuple[int, int]
    codes: str
    scale: str
    global_scale: str | None = None
    global_divides: bool = True
    activation: ActivationSpec | None = None  #: as the checkpoint declares it
    input_scale: str | None = None
    expert: int | None = None  #: index in the first dimension of `codes` and `scale` (gpt-oss, mlx)
    zero_point: str | None = None

    @property
    def fused(self) -> bool:
        """Whether the plain model has it in one tensor with all experts (gpt-oss), not in a tensor of its own."""
        return self.expert is not None and self.module.endswith(f".{self.expert}")

    @property
    def plain_name(self) -> str:
        return self.module.rpartition(".")[0] if self.fused else f"{self.module}.weight"

    @property
    def tensors(self) -> tuple[str, ...]:
        names = (self.codes, self.scale, self.global_scale, self.zero_point, self.input_scale)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True)
class Description:
    """Description of the quantized weights of a checkpoint."""

    layout: str | None
    weights: dict[str, StoredWeight] = field(default_factory=dict)
    auxiliary: frozenset[str] = frozenset()
    kv: KVSpec | None = None

    @property
    def quantizes_inputs(self) -> bool:
        """Whether the checkpoint declares quantized inputs for any weight."""
        return any(weight.activation is not None for weight in self.weights.values())


def scale_rule_of(checkpoint: Checkpoint) -> str | None:
    """Return the rule of the scales that the config, as that of DeepSeek V3.1, or all files name; None if none do."""
    if (checkpoint.quantization_config or {}).get("scale_fmt") == "ue8m0":
        return ScaleRule.RCEIL.value
    named = {metadata.get(SCALE_RULE) for metadata in checkpoint.metadata.values()}
    return named.pop() if len(named) == 1 else None


def kv_scale_of(name: str) -> tuple[str, str] | None:
    """Return the attention module of a KV scale, and ``"k"`` or ``"v"``; None for other tensors."""
    match = _KV_SCALE.fullmatch(name)
    letter = match and (match["scale"] or match["projection"])
    return (match["attention"], letter) if match and letter else None


def tensors_with_suffix(checkpoint: Checkpoint, suffix: str) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors whose names end in `suffix`, each with its name without the suffix."""
    for name, info in checkpoint.tensors.items():
        if name.endswith(suffix):
            yield name.removesuffix(suffix), info


def granularity_of(scale: TensorInfo, shape: tuple[int, int], block: Granularity | None) -> Granularity:
    """Return the granularity that the number of scales fits: the declared block, TENSOR or CHANNEL."""
    entries = math.prod(scale.shape)
    if block is not None and entries == math.prod(block.scale_shape(shape)):
        return block
    if entries == 1:
        return TENSOR
    return CHANNEL if entries == shape[0] else block or TENSOR


def weight_shape(codes: TensorInfo, element: ElementFormat) -> tuple[int, int]:
    """Return ``(N, K)`` of the weight whose codes are stored as a matrix, two to a byte for 4-bit elements."""
    if len(codes.shape) != 2:
        raise ShapeError(codes.name, f"expected a matrix of codes, found shape {list(codes.shape)}")
    rows, stored_cols = codes.shape
    return (rows, stored_cols * codes.nbytes * 8 // (element.bits * math.prod(codes.shape)) if codes.nbytes else 0)


def stored_spec(
    shape: tuple[int, int], scale: TensorInfo, element: ElementFormat, granularity: Granularity, experts: int = 1
) -> WeightSpec:
    try:
        scale_format = SCALE_FORMATS[scale.dtype]
    except KeyError:
        known = ", ".join(SCALE_FORMATS)
        raise UnsupportedTensorError(scale.name, f"scales are stored as one of {known}; found {scale.dtype}") from None
    refuse_groups(scale.name, element, granularity, scale_format, shape[1])
    grid = granularity.scale_shape(shape)
    if _squeezed(scale.shape) != _squeezed((experts, *grid)):
        raise ShapeError(
            scale.name,
            f"{granularity} scales of a {shape[0]}x{shape[1]} weight are a grid of {grid[0]}x{grid[1]}; "
            f"found shape {list(scale.shape)}: config and tensors are not of the same checkpoint, download both again",
        )
    return WeightSpec(element, granularity, scale_format)


def refuse_groups(
    tensor: str, element: ElementFormat, granularity: Granularity, scale: ElementFormat, cols: int | None = None
) -> None:
    """Raise unless groups have the size of the format, as a near one would multiply by a neighbour's scale."""
    in_groups = granularity.rows == 1 and granularity.cols is not None  # blocks with E8M0 (DeepSeek) are no MX format
    if scale is E4M3:
        name, required = "NVFP4", GROUP_16
    elif scale is E8M0 and (in_groups or element is E2M1):
        name, required = "MX", GROUP_32
    else:
        return
    if granularity != required:
        raise ShapeError(
            tensor,
            f"{element.name} with {scale.name} scales is an {name} format, whose groups are {required}; the config "
            f"declares {granularity}: config and tensors are not of the same checkpoint, download both again",
        )
    if cols is not None and cols % (required.cols or 1):
        raise ShapeError(
            tensor,
            f"{name} formats have whole groups of {required.cols} columns; found {cols} columns: the checkpoint is "
            "damaged, download it again",
        )


def global_scale_name(checkpoint: Checkpoint, name: str, spec: WeightSpec) -> str | None:
    info = checkpoint.tensors.get(name)
    if not spec.has_global_scale:
        if info is not None:
            raise UnsupportedTensorError(
                name, f"weights with {spec.scale.name} scales have no global scale: config and tensors contradict"
            )
        return None
    if info is None:
        raise ShapeError(name, "missing: NVFP4 weights have a global scale; download the checkpoint again")
    if math.prod(info.shape) != 1:
        raise ShapeError(name, f"expected one global scale, found the shape {list(info.shape)}")
    return name


def _squeezed(shape: Sequence[int]) -> list[int]:
    """Return a shape without extents of one; layouts differ in those."""
    return [extent for extent in shape if extent != 1]


#: ``covers(entry, module)`` returns whether an entry of a list matches a module.
Covers = Callable[[str, str], bool]


def by_name_or_pattern(entry: str, module: str) -> bool:
    """Match as compressed-tensors does: the exact name, or ``re:`` and a regular expression from the start."""
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return entry == module


def by_name_or_parent(entry: str, module: str) -> bool:
    """Match as readers of `quant_method: fp8` do: the exact name, or (transformers) the name of a parent module."""
    return entry == module or module.startswith(f"{entry}.")


def by_wildcard(entry: str, module: str) -> bool:
    """Match as ModelOpt does: the exact name, or a pattern with ``*``."""
    return entry == module or fnmatch.fnmatchcase(module, entry)


def refuse_excluded(config_path: Path, key: str, entries: Any, modules: Iterable[str], covers: Covers) -> None:
    """Raise if a list of unquantized modules matches one that is stored as codes: servers would use those as weights.

    Source: vLLM 0.32, `is_layer_skipped`, `should_ignore_layer`; compressed-tensors 0.20, `match_name`; transformers.
    """
    if entries is None:
        return
    for module in modules:
        for entry in entries:
            try:
                covered = covers(entry, module)
            except re.error as error:
                raise ConfigError(config_path, f"{key}: {entry!r} is not a regular expression: {error}") from None
            if covered:
                raise ConfigError(
                    config_path,
                    f"{key} lists {entry!r}, yet {module} is stored as codes with a scale: servers would read the "
                    "codes as weights; take it off the list, or store the weight unquantized",
                )
