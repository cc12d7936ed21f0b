"""NVIDIA ModelOpt's unified Hugging Face export: FP8, NVFP4, MXFP8 and mixtures of them.

A mixed export differs by layer, so each weight is described from its own tensors. `weight_scale_2` (NVFP4) multiplies.

Source: ModelOpt 0.47, `export/quant_utils.py` and `export/convert_hf_config.py`; vLLM 0.32, `quantization/modelopt.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from minifloat._version import __version__
from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE
from minifloat.errors import ConfigError, ShapeError, UsageError
from minifloat.model.layouts.stored import (
    Description,
    StoredWeight,
    by_wildcard,
    global_scale_name,
    granularity_of,
    refuse_excluded,
    stored_spec,
    tensors_with_suffix,
    weight_shape,
)
from minifloat.model.layouts.writing import NO_NAMES, WeightTensors, WriteLayout, codes_tensor, scale_tensor
from minifloat.numerics.formats import E2M1, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, TENSOR, TOKEN, Granularity
from minifloat.numerics.scheme import SCHEMES, ActivationSpec, KVSpec, Scheme, WeightSpec

NAME = "modelopt"

#: Keys of the lists of unquantized modules in hf_quant_config.json and in config.json.
_EXCLUSIONS = ("exclude_modules", "ignore")
_AUXILIARY = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_proj.output_scale", ".v_proj.output_scale")


#: Formats of weights and inputs by `quant_algo`. ModelOpt calls 128x128 blocks weight-only ("WO"), but vLLM quantizes
#: their inputs.
ALGORITHMS: dict[str, tuple[WeightSpec, ActivationSpec | None]] = {
    "FP8": (WeightSpec(E4M3, TENSOR), ActivationSpec(E4M3, TENSOR, dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightSpec(E4M3, CHANNEL), ActivationSpec(E4M3, TOKEN, dynamic=True)),
    "FP8_PB_WO": (WeightSpec(E4M3, BLOCK_128), None),
    "NVFP4": (WeightSpec(E2M1, GROUP_16, E4M3), ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E4M3)),
    "W4A16_NVFP4": (WeightSpec(E2M1, GROUP_16, E4M3), None),
    "MXFP8": (WeightSpec(E4M3, GROUP_32, E8M0), ActivationSpec(E4M3, GROUP_32, dynamic=True, scale=E8M0)),
}
MIXED = "MIXED_PRECISION"

#: Of config.json, in which no server reads the producer.
_PRODUCER = {"name": "minifloat", "version": __version__}
#: Of hf_quant_config.json: vLLM 0.32 refuses a file of another producer (model_loader/weight_utils.py:
#: get_quant_config). The version is that of ModelOpt whose format is written.
_FILE_PRODUCER = {
    "name": "modelopt",
    "version": "0.47.0",
    "comment": f"written by minifloat {__version__} in this format; vLLM reads the file only under this name",
}
_FLOAT_ARGS = {"dynamic": False, "type": "float"}


@dataclass(frozen=True)
class ModelOptWriter(WriteLayout):
    """Writer of the schemes that have a `quant_algo`, and of mixtures of them."""

    name: str = NAME
    global_divides: ClassVar[bool] = False

    def check(self, scheme: Scheme) -> None:
        """Check that the formats of weights and inputs are in `ALGORITHMS`."""
        _algorithm(scheme)

    def weight_tensors(
        self, module: str, spec: WeightSpec, shape: tuple[int, int], experts: int | None = None
    ) -> WeightTensors:
        """Return ``weight`` (packed for E2M1), ``weight_scale`` and for NVFP4 ``weight_scale_2``."""
        rows, cols = shape
        block_rows, block_cols = spec.granularity.block(shape)
        if rows % block_rows or cols % block_cols:
            raise ShapeError(
                f"{module}.weight",
                f"{rows}x{cols} is not made of whole {block_rows}x{block_cols} blocks, which layout {NAME!r} cannot "
                "hold; use --layout compressed-tensors",
            )
        grid: tuple[int, ...] = spec.granularity.scale_shape(shape)
        if spec.granularity == TENSOR:
            grid = ()
        elif spec.granularity == CHANNEL:
            grid = (rows,)
        elif spec.granularity == BLOCK_128:
            grid = (grid[0], 1, grid[1], 1)
        return WeightTensors(
            codes_tensor(f"{module}.weight", spec, shape),
            scale_tensor(f"{module}.weight_scale", spec, grid),
            OutputTensor(f"{module}.weight_scale_2", "F32", ()) if spec.has_global_scale else None,
        )

    def input_scale(self, module: str, weight: WeightSpec) -> OutputTensor:
        return OutputTensor(f"{module}.input_scale", "F32", ())

    def kv_scales(self, attention: str) -> tuple[OutputTensor, OutputTensor]:
        """Return ``k_proj.k_scale`` and ``v_proj.v_scale`` of the attention module, float32 scalars."""
        return (
            OutputTensor(f"{attention}.k_proj.k_scale", "F32", ()),
            OutputTensor(f"{attention}.v_proj.v_scale", "F32", ()),
        )

    def quantization_config(
        self,
        modules: Mapping[str, Scheme],
        kept: Sequence[str],
        kv: KVSpec | None = None,
        names: Mapping[str, Sequence[str]] = NO_NAMES,
    ) -> dict[str, Any]:
        """Return config.json's part, as ModelOpt 0.47 writes it; transformers, and so `names`, does not read it."""
        algorithms = {module: _algorithm(scheme) for module, scheme in modules.items()}
        _refuse_substrings(kept, modules)
        algorithm_names = sorted(set(algorithms.values()))
        config: dict[str, Any] = {}
        if len(algorithm_names) == 1 and algorithm_names[0] in ("FP8", "NVFP4", "W4A16_NVFP4"):
            config["config_groups"] = {"group_0": _group(algorithm_names[0]) | {"targets": ["Linear"]}}
        elif len(algorithm_names) > 1:
            config["config_groups"] = {
                f"group_{number}": _group(name)
                | {"targets": sorted(module for module, algorithm in algorithms.items() if algorithm == name)}
                for number, name in enumerate(algorithm_names)
            }
            config["quantized_layers"] = _layers(algorithms)
        config |= {"ignore": list(kept), "quant_algo": algorithm_names[0] if len(algorithm_names) == 1 else MIXED}
        if kv is not None:
            config["kv_cache_scheme"] = {"num_bits": kv.element.bits} | _FLOAT_ARGS
        return config | {"producer": _PRODUCER, "quant_method": NAME}

    def extra_files(
        self, modules: Mapping[str, Scheme], kept: Sequence[str], kv: KVSpec | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return hf_quant_config.json, which older servers read."""
        algorithms = {module: _algorithm(scheme) for module, scheme in modules.items()}
        names = sorted(set(algorithms.values()))
        quantization: dict[str, Any] = {
            "quant_algo": names[0] if len(names) == 1 else MIXED,
            "kv_cache_quant_algo": None if kv is None else "FP8",
        }
        if len(names) == 1:
            quantization |= _group_size(names[0])
        else:
            quantization["quantized_layers"] = _layers(algorithms)
        return {
            HF_QUANT_CONFIG_FILE: {
                "producer": _FILE_PRODUCER,
                "quantization": quantization | {"exclude_modules": list(kept)},
            }
        }


WRITER = ModelOptWriter()


def _algorithm(scheme: Scheme) -> str:
    weights, inputs = _formats(scheme.weight), scheme.activation
    for name, (weight, activation) in ALGORITHMS.items():
        if _formats(weight) == weights and activation == inputs:
            return name
    raise UsageError(f"layout {NAME!r} has no quant_algo for {scheme.name!r}: {_why_none(scheme)}")


def _formats(weight: WeightSpec) -> tuple[ElementFormat, Granularity, ElementFormat]:
    return weight.element, weight.granularity, weight.scale


def _why_none(scheme: Scheme) -> str:
    """Return why no `quant_algo` holds a scheme, and the cure."""

    def inputs(activation: ActivationSpec | None) -> str:
        return "16 bits" if activation is None else str(activation)

    for name, (weight, activation) in ALGORITHMS.items():
        if _formats(weight) == _formats(scheme.weight):
            same = next((s.name for s in SCHEMES.values() if _holds(s, weight, activation)), None)
            cure = "" if same is None else f"quantize with --scheme {same}, or "
            return (
                f"{name} has these weights with inputs in {inputs(activation)}, and this scheme has inputs in "
                f"{inputs(scheme.activation)}; {cure}use layout compressed-tensors"
            )
    element, granularity, scale = _formats(scheme.weight)
    return (
        f"none of {', '.join(ALGORITHMS)} has weights in {element.name} with {scale.name} scales per {granularity}; "
        "use layout compressed-tensors"
    )


def _holds(scheme: Scheme, weight: WeightSpec, activation: ActivationSpec | None) -> bool:
    return _formats(scheme.weight) == _formats(weight) and scheme.activation == activation


def _group_size(algorithm: str) -> dict[str, int]:
    granularity = ALGORITHMS[algorithm][0].granularity
    return {"group_size": granularity.cols} if granularity.rows == 1 and granularity.cols else {}


def _group(algorithm: str) -> dict[str, Any]:
    """Return an entry of `config_groups` without its targets; for 128x128 blocks ModelOpt writes `quant_algo` only."""
    weight, activation = ALGORITHMS[algorithm]
    if weight.granularity == BLOCK_128:
        return {"quant_algo": algorithm}
    args = _FLOAT_ARGS | {"num_bits": weight.element.bits} | _group_size(algorithm)
    channel = {"strategy": "channel"} if weight.granularity == CHANNEL else {}
    return ({} if activation is None else {"input_activations": args}) | {"weights": args | channel}


def _layers(algorithms: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    return {module: {"quant_algo": name} | _group_size(name) for module, name in algorithms.items()}


def _refuse_substrings(kept: Sequence[str], modules: Iterable[str]) -> None:
    """Refuse names of unquantized modules that vLLM would find in quantized ones: ``mlp.gate`` in ``mlp.gate_proj``."""
    names = list(modules)
    for entry in kept:
        for module in names:
            if entry in module:
                raise UsageError(
                    f"{module} is quantized and {entry} is not: in layout {NAME!r} vLLM would find the name of the "
                    "one in that of the other and leave out both; use compressed-tensors"
                )


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a ModelOpt checkpoint from its tensors; the config adds the KV cache and the weight-only modules."""
    quantization = config.get("quantization", config)
    weights = {}
    for module, scale in tensors_with_suffix(checkpoint, ".weight_scale"):
        codes = checkpoint.tensors.get(f"{module}.weight")
        if codes is None or codes.dtype not in ("U8", "F8_E4M3"):
            continue
        element = E2M1 if codes.dtype == "U8" else E4M3
        shape = weight_shape(codes, element)
        spec = stored_spec(shape, scale, element, _granularity(scale, shape, element))
        _refuse_group_size(checkpoint.path / "config.json", quantization, module, spec)
        input_scale = f"{module}.input_scale"
        algorithm = algorithm_of(quantization, module)
        weight_only = algorithm.endswith("_WO") or "A16" in algorithm
        weights[module] = StoredWeight(
            module=module,
            spec=spec,
            shape=shape,
            codes=codes.name,
            scale=scale.name,
            global_scale=global_scale_name(checkpoint, f"{module}.weight_scale_2", spec),
            global_divides=False,
            activation=None if weight_only else _activation(spec, input_scale in checkpoint.tensors),
            input_scale=input_scale if input_scale in checkpoint.tensors else None,
        )
    for key in _EXCLUSIONS:
        refuse_excluded(checkpoint.path / "config.json", key, quantization.get(key), weights, by_wildcard)
    auxiliary = frozenset(name for name in checkpoint.tensors if name.endswith(_AUXILIARY))
    return Description(NAME, weights, auxiliary, _kv(quantization))


def _refuse_group_size(path: Path, quantization: Mapping[str, Any], module: str, spec: WeightSpec) -> None:
    """Raise a ConfigError if the config declares another group size than the scales of a weight have."""
    groups = spec.granularity.rows == 1 and spec.granularity.cols is not None
    layers = quantization.get("quantized_layers") or {}
    stated = layers.get(module, quantization).get("group_size") if groups else None
    if stated is not None and stated != spec.granularity.cols:
        raise ConfigError(
            path,
            f"group_size is {stated}, and the scales of {module} are {spec.granularity}: take both from the same "
            "checkpoint",
        )
    for name, group in (quantization.get("config_groups") or {}).items():
        for part in ("weights", "input_activations"):
            args = group.get(part) or {}
            right = GROUP_16.cols if args.get("num_bits") == E2M1.bits else GROUP_32.cols
            if args.get("group_size") not in (None, right):
                raise ConfigError(
                    path,
                    f"config_groups.{name}.{part}.group_size is {args['group_size']}; groups of {args.get('num_bits')} "
                    f"bits in this layout are {right}",
                )


def algorithm_of(quantization: Mapping[str, Any], module: str) -> str:
    """Return the `quant_algo` of a module in capitals: its own in a mixture, else that of the model; "" if none."""
    layers = quantization.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, dict) else None
    entry = own if isinstance(own, dict) else quantization
    return str(entry.get("quant_algo") or "").upper()


def _kv(quantization: Mapping[str, Any]) -> KVSpec | None:
    """Return the KV cache format from ``FP8``, ``NVFP4`` or, in newer files, the number of bits; None otherwise."""
    scheme = quantization.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) and scheme.get("type") == "float" else None
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm == "FP8" or bits == E4M3.bits:
        return KVSpec(E4M3, TENSOR)
    return KVSpec(E2M1, GROUP_16) if algorithm == "NVFP4" or bits == E2M1.bits else None


def _granularity(scale: TensorInfo, shape: tuple[int, int], element: ElementFormat) -> Granularity:
    """Return the granularity: 1x16 for E4M3 scales, 1x32 for E8M0; for float scales tensor, channel or 128x128."""
    if scale.dtype == "F8_E4M3":
        return GROUP_16
    if scale.dtype in ("U8", "F8_E8M0") or element is E2M1:
        return GROUP_32
    return granularity_of(scale, shape, BLOCK_128 if len(scale.shape) > 1 else None)


def _activation(spec: WeightSpec, has_input_scale: bool) -> ActivationSpec | None:
    """Return the format of inputs: with an input scale NVFP4 or static; without it E2M1 is weight-only."""
    if spec.element is E2M1:
        return ALGORITHMS["NVFP4"][1] if spec.has_global_scale and has_input_scale else None
    if has_input_scale:
        return ALGORITHMS["FP8"][1]
    return ALGORITHMS["MXFP8" if spec.granularity == GROUP_32 else "FP8_PER_CHANNEL_PER_TOKEN"][1]
