"""The compressed-tensors layout, which vLLM, SGLang and transformers read; packs of integers are read only.

In a pack (also of Kimi K2) ``weight_packed`` is int32 ``[N, ceil(K * bits / 32)]``, the first element of a row in the
lowest bits; ``weight_zero_point`` is packed alike along the rows: int32 ``[ceil(N * bits / 32), K / group]``.

Source: compressed-tensors 0.20, `QuantizationConfig` and `compressors/pack_quantized`; llm-compressor 0.14.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.tensors import DTYPES
from minifloat.errors import ConfigError, ShapeError, UnsupportedTensorError, UsageError
from minifloat.model.architecture.roles import is_embedding
from minifloat.model.layouts.stored import (
    Description,
    StoredWeight,
    by_name_or_pattern,
    global_scale_name,
    refuse_excluded,
    refuse_groups,
    stored_spec,
    tensors_with_suffix,
    weight_shape,
)
from minifloat.model.layouts.writing import NO_NAMES, WeightTensors, WriteLayout, codes_tensor, scale_tensor, with_names
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, INT4, INT8, ElementFormat, IntegerFormat
from minifloat.numerics.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block_granularity
from minifloat.numerics.scheme import ActivationSpec, KVSpec, Scheme, WeightSpec

CODES_DTYPE = "I32"
_PLAIN_DTYPE = "I8"  # of zero points that are not packed: those of one scale per tensor
_AGAIN = "the checkpoint is damaged, download it again"


def pack_shape(
    checkpoint: Checkpoint, module: str, codes: TensorInfo, element: ElementFormat, granularity: Granularity
) -> tuple[int, int]:
    """Return ``(N, K)`` of a pack, from its ``weight_shape``; where that cannot be read, from its scales or width."""
    if len(codes.shape) != 2:
        raise ShapeError(codes.name, f"expected a matrix of packed codes, found shape {list(codes.shape)}")
    order = f"{module}.weight_g_idx"
    if order in checkpoint.tensors:
        raise UnsupportedTensorError(
            order,
            'groups of columns in the order of activations (actorder "group") are not read; use a checkpoint with '
            'actorder "weight" or none',
        )
    per_word = DTYPES[CODES_DTYPE] // element.bits
    rows, words = codes.shape
    declared = _declared_shape(checkpoint, module)
    if declared is None:
        grid = checkpoint.tensors[f"{module}.weight_scale"].shape
        grouped = granularity.rows == 1 and granularity.cols is not None and len(grid) == 2
        declared = (rows, grid[1] * (granularity.cols or 1) if grouped else words * per_word)
    if declared[0] != rows or -(-declared[1] // per_word) != words:
        raise ShapeError(
            codes.name,
            f"a pack of {element.name} holds {per_word} columns in each int32, so a {declared[0]}x{declared[1]} weight "
            f"has the shape [{declared[0]}, {-(-declared[1] // per_word)}]; found {list(codes.shape)}: {_AGAIN}",
        )
    if declared[1] * element.bits % 8:
        raise ShapeError(
            codes.name,
            f"an {element.name} weight has an even number of columns, because two share a byte; found {declared[1]}: "
            "quantize the original model instead",
        )
    return declared


def zero_point_name(
    checkpoint: Checkpoint, module: str, element: ElementFormat, granularity: Granularity, symmetric: bool
) -> str | None:
    name = f"{module}.weight_zero_point"
    info = checkpoint.tensors.get(name)
    if symmetric == (info is not None):
        found = f"{name} is stored" if info is not None else f"there is no {name}"
        raise ConfigError(
            checkpoint.path / "config.json",
            f"the config group of {module} declares {'symmetric' if symmetric else 'asymmetric'} weights, yet {found}: "
            f"{_AGAIN}",
        )
    if info is None:
        return None
    grid = checkpoint.tensors[f"{module}.weight_scale"].shape
    expected: tuple[int, ...] = tuple(grid)
    if info.dtype == CODES_DTYPE and granularity != TENSOR and grid:
        per_word = DTYPES[CODES_DTYPE] // element.bits
        expected = (-(-grid[0] // per_word), *grid[1:])
    elif info.dtype != _PLAIN_DTYPE:
        raise UnsupportedTensorError(
            name, f"zero points are stored as {CODES_DTYPE} or {_PLAIN_DTYPE}; found {info.dtype}"
        )
    if math.prod(info.shape) != math.prod(expected):
        raise ShapeError(
            name, f"expected the shape {list(expected)} beside scales {list(grid)}, found {list(info.shape)}: {_AGAIN}"
        )
    return name


def _declared_shape(checkpoint: Checkpoint, module: str) -> tuple[int, int] | None:
    """Return what ``weight_shape`` says; None if there is none, or only headers are known."""
    info = checkpoint.tensors.get(f"{module}.weight_shape")
    if info is None or not checkpoint.readable:
        return None
    dtype = {"I32": np.int32, "I64": np.int64}.get(info.dtype)
    if dtype is None or math.prod(info.shape) != 2:
        raise ShapeError(info.name, f"expected two integers, N and K, found {info.dtype} {list(info.shape)}: {_AGAIN}")
    rows, cols = checkpoint.read(info.name).view(dtype)
    return int(rows), int(cols)


NAME = "compressed-tensors"
#: Version of compressed-tensors whose `model_dump` defines the written config.
SPEC_VERSION = "0.20.0"

_AUXILIARY = re.compile(r"\.([kqv]_scale|weight_shape|input_global_scale|[kqv]_zero_point)$")
#: Element by type and number of bits, and the dtypes of its codes.
_ELEMENTS = {("float", 4): E2M1, ("float", 8): E4M3, ("int", 4): INT4, ("int", 8): INT8}
_CODE_DTYPES = {
    E2M1: ("U8", "I8", "F4"),
    E4M3: ("F8_E4M3",),
    INT4: (CODES_DTYPE,),
    INT8: (CODES_DTYPE,),
}
_SCALE_FORMATS: dict[Any, ElementFormat] = {"torch.uint8": E8M0, "torch.float8_e4m3fn": E4M3}
_HEAD = "lm_head"
#: Names of modules of experts, and the target that matches all of them.
_EXPERT = re.compile(r"\.experts\.\d+\.")
_EXPERTS_TARGET = r"re:.*\.experts\.\d+\..*"


@dataclass(frozen=True)
class CompressedTensorsWriter(WriteLayout):
    """Writer of every scheme of floats."""

    name: str = NAME

    def check(self, scheme: Scheme) -> None:
        if isinstance(scheme.weight.element, IntegerFormat):
            raise UsageError(
                f"packs of {scheme.weight.element.name} are read, not written: use minifloat convert --dequantize, or "
                "minifloat quantize --from-quantized with a scheme of floats"
            )

    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        """Return ``weight`` (``weight_packed`` for E2M1), ``weight_scale`` and for NVFP4 ``weight_global_scale``."""
        packed = "_packed" if spec.element is E2M1 else ""
        grid = (1,) if spec.granularity == TENSOR else spec.granularity.scale_shape(shape)
        return WeightTensors(
            codes_tensor(f"{module}.weight{packed}", spec, shape),
            scale_tensor(f"{module}.weight_scale", spec, grid),
            OutputTensor(f"{module}.weight_global_scale", "F32", (1,)) if spec.has_global_scale else None,
        )

    def input_scale(self, module: str, weight: WeightSpec) -> OutputTensor:
        """Return ``input_scale``, for NVFP4 ``input_global_scale``, float32 ``[1]``."""
        return OutputTensor(f"{module}.{_input_scale_name(weight)}", "F32", (1,))

    def kv_scales(self, attention: str) -> tuple[OutputTensor, OutputTensor]:
        """Return ``k_scale`` and ``v_scale`` of the attention module, float32 ``[1]``."""
        return (
            OutputTensor(f"{attention}.k_scale", "F32", (1,)),
            OutputTensor(f"{attention}.v_scale", "F32", (1,)),
        )

    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        """Return a config with one group per scheme."""
        schemes = sorted(set(modules.values()), key=lambda scheme: scheme.name)
        others = [module for module in modules if module.rpartition(".")[2] == _HEAD or is_embedding(module)]
        experts = {scheme for module, scheme in modules.items() if _EXPERT.search(module)}
        groups = {}
        for number, scheme in enumerate(schemes):
            members = [module for module, module_scheme in modules.items() if module_scheme == scheme]
            if experts == {scheme}:
                members = [*(member for member in members if not _EXPERT.search(member)), _EXPERTS_TARGET]
            groups[f"group_{number}"] = {
                "targets": with_names(["Linear", *others] if len(schemes) == 1 else members, names),
                "format": _format_name(scheme),
                "weights": _float_args(scheme.weight.element, scheme.weight.granularity, dynamic=False)
                | _scale_args(scheme.weight),
                "input_activations": _activation_args(scheme.activation),
                "output_activations": None,
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": NAME,
            "version": SPEC_VERSION,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "config_groups": groups,
            "ignore": with_names(kept, names),
            "kv_cache_scheme": None if kv is None else _float_args(kv.element, kv.granularity, dynamic=False),
            "sparsity_config": {},
            "transform_config": {},
        }


WRITER = CompressedTensorsWriter()


def _format_name(scheme: Scheme) -> str:
    """Return the name of the compressor of a scheme; "float-quantized" requires quantized activations."""
    if scheme.weight.has_global_scale:
        return "nvfp4-pack-quantized"
    if scheme.weight.scale is E8M0:
        return "mxfp4-pack-quantized" if scheme.weight.element is E2M1 else "mxfp8-quantized"
    return "naive-quantized" if scheme.activation is None else "float-quantized"


def _scale_args(spec: WeightSpec | ActivationSpec) -> dict[str, Any]:
    """Return the `QuantizationArgs` of E8M0 and E4M3 scales; float32 scales have none."""
    if spec.scale is E8M0:
        return {"scale_dtype": "torch.uint8"}
    return {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"} if spec.scale is E4M3 else {}


def _activation_args(spec: ActivationSpec | None) -> dict[str, Any] | None:
    """Return the `QuantizationArgs` of inputs; those of NVFP4 are "local": dynamic scales under a static global one."""
    if spec is None:
        return None
    args = _float_args(spec.element, spec.granularity, spec.dynamic) | _scale_args(spec)
    return args | ({"dynamic": "local"} if spec.has_global_scale else {})


def _float_args(element: ElementFormat, granularity: Granularity, dynamic: bool) -> dict[str, Any]:
    args: dict[str, Any] = {"num_bits": element.bits, "type": "float", "symmetric": True, "dynamic": dynamic}
    simple = {TENSOR: "tensor", CHANNEL: "channel", TOKEN: "token"}
    in_rows = granularity.rows == 1
    args["strategy"] = simple.get(granularity, "group" if in_rows else "block")
    args["group_size"] = granularity.cols if args["strategy"] == "group" else None
    if args["strategy"] == "block":
        args["block_structure"] = [granularity.rows, granularity.cols]
    return args


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    config_path = checkpoint.path / "config.json"
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(config_path, "quantization_config.config_groups is not an object of groups")
    weights = {}
    for module, scale in tensors_with_suffix(checkpoint, ".weight_scale"):
        codes = checkpoint.tensors.get(f"{module}.weight_packed") or checkpoint.tensors.get(f"{module}.weight")
        if codes is None:
            raise ConfigError(config_path, f"{scale.name} has no {module}.weight or {module}.weight_packed beside it")
        group = _group_of(module, groups, config_path)
        args: Mapping[str, Any] = group.get("weights") or {}
        element, granularity = _parse_args(args, config_path)
        if codes.dtype not in _CODE_DTYPES[element]:
            raise ConfigError(
                config_path,
                f"the config group of {module} declares {element.name} weights, whose codes are stored as "
                f"{_CODE_DTYPES[element][0]}, yet {codes.name} is {codes.dtype}: take both from the same checkpoint",
            )
        zero_point = None
        if isinstance(element, IntegerFormat):
            shape = pack_shape(checkpoint, module, codes, element, granularity)
            symmetric = bool(args.get("symmetric", True))
            zero_point = zero_point_name(checkpoint, module, element, granularity, symmetric)
        else:
            shape = weight_shape(codes, element)
        spec = stored_spec(shape, scale, element, granularity)
        activation = _parse_activation(group.get("input_activations"), spec, config_path)
        if activation is not None:
            refuse_groups(f"inputs of {module}", activation.element, activation.granularity, activation.scale, shape[1])
        weights[module] = StoredWeight(
            module=module,
            spec=spec,
            shape=shape,
            codes=codes.name,
            scale=scale.name,
            global_scale=global_scale_name(checkpoint, f"{module}.weight_global_scale", spec),
            activation=activation,
            input_scale=_present(checkpoint, f"{module}.{_input_scale_name(activation)}"),
            zero_point=zero_point,
        )
    refuse_excluded(config_path, "ignore", config.get("ignore"), weights, by_name_or_pattern)
    used = {name for weight in weights.values() for name in weight.tensors}
    auxiliary = frozenset(name for name in checkpoint.tensors if _AUXILIARY.search(name)) - used
    kv = config.get("kv_cache_scheme")
    kv_spec = KVSpec(*_parse_args(kv, config_path)) if kv else None
    return Description(NAME, weights, auxiliary, kv_spec)


def _input_scale_name(spec: WeightSpec | ActivationSpec | None) -> str:
    """Return the name of the tensor of an input's static scale; that of NVFP4 is a divisor."""
    return "input_global_scale" if spec is not None and spec.has_global_scale else "input_scale"


def _present(checkpoint: Checkpoint, name: str) -> str | None:
    return name if name in checkpoint.tensors else None


def _group_of(module: str, groups: Mapping[str, Any], config_path: Any) -> dict[str, Any]:
    """Return the config group of a module, matched in the order of the library: name, pattern, module class."""
    by_class: dict[str, Any] | None = None
    by_pattern: dict[str, Any] | None = None
    for group in groups.values():
        for target in group.get("targets") or ():
            if target == module:
                return dict(group)
            if target.startswith("re:"):
                if by_pattern is None and re.match(target.removeprefix("re:"), module):
                    by_pattern = group
            elif by_class is None and target[:1].isupper():  # "Linear" is a class, "lm_head" a name
                by_class = group
    match = by_pattern or by_class
    if match is None:
        raise ConfigError(config_path, f"no config group of quantization_config targets {module}, which has a scale")
    return dict(match)


def _parse_args(args: Any, config_path: Any) -> tuple[ElementFormat, Granularity]:
    if not isinstance(args, dict) or (args.get("type"), args.get("num_bits")) not in _ELEMENTS:
        raise ConfigError(
            config_path, f"expected floats or integers of 4 or 8 bits in quantization_config, found {args!r}"
        )
    strategy, size = args.get("strategy"), args.get("group_size")
    simple = {"tensor": TENSOR, "channel": CHANNEL, "token": TOKEN, "attn_head": CHANNEL}
    element = _ELEMENTS[args["type"], args["num_bits"]]
    if strategy in simple:
        return element, simple[strategy]
    if strategy in ("group", "tensor_group") and isinstance(size, int) and size > 0:
        return element, block_granularity(1, size)
    structure = args.get("block_structure")
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
        return element, block_granularity(*structure)
    raise ConfigError(
        config_path,
        f"unsupported strategy {strategy!r} with group_size {size!r}, block_structure {structure!r}; expected tensor, "
        "channel, token, attn_head, or group, tensor_group or block with a size",
    )


def _parse_activation(args: Any, weight: WeightSpec, config_path: Any) -> ActivationSpec | None:
    """Return the format of inputs; `weight` tells MX inputs in files of older versions, without ``scale_dtype``."""
    if not args:
        return None
    element, granularity = _parse_args(args, config_path)
    scale = _SCALE_FORMATS.get(args.get("scale_dtype"))
    if scale is None and args.get("strategy") == "tensor_group":
        scale = E4M3
    elif scale is None and (element, granularity) == (weight.element, weight.granularity):
        scale = weight.scale
    return ActivationSpec(element, granularity, bool(args.get("dynamic")), scale or FLOAT32)
