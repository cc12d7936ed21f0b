"""NVIDIA ModelOpt's unified Hugging Face export: FP8, NVFP4, MXFP8 and mixtures of them.

The config names an algorithm for the whole model, but a mixed export differs by layer, so each weight is told from
its own tensors: the dtype of the codes, the dtype and size of the scale, and `weight_scale_2` (NVFP4), which
multiplies. An E2M1 weight is uint8 ``[N, K / 2]`` under the name ``weight``.

Source: ModelOpt 0.47, `export/quant_utils.py`, `export/convert_hf_config.py` and `hf_quant_config.json` as written; for
what is read, vLLM 0.32, `quantization/modelopt.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.layout import HF_QUANT_CONFIG_FILE
from minifloat.errors import ShapeError, UsageError
from minifloat.layouts.exclusion import by_wildcard, refuse_excluded
from minifloat.layouts.stored import (
    Description,
    StoredWeight,
    granularity_of,
    stored_spec,
    tensors_with_suffix,
    weight_shape,
)
from minifloat.layouts.writing import WeightTensors, codes_tensor, scale_tensor
from minifloat.numerics.formats import E2M1, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, TENSOR, TOKEN, Granularity
from minifloat.numerics.scheme import ActivationSpec, KVSpec, Scheme, WeightSpec

NAME = "modelopt"

#: Where the modules that are not quantized are listed: in hf_quant_config.json, in config.json.
_EXCLUSIONS = ("exclude_modules", "ignore")
_AUXILIARY = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_proj.output_scale", ".v_proj.output_scale")


# ---------------------------------------------------------------------------------------------------- writing

#: `quant_algo` -> what it stores. ModelOpt calls 128x128 blocks weight-only ("WO"); vLLM rounds their inputs anyway.
ALGORITHMS: dict[str, tuple[WeightSpec, ActivationSpec | None]] = {
    "FP8": (WeightSpec(E4M3, TENSOR), ActivationSpec(E4M3, TENSOR, dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": (WeightSpec(E4M3, CHANNEL), ActivationSpec(E4M3, TOKEN, dynamic=True)),
    "FP8_PB_WO": (WeightSpec(E4M3, BLOCK_128), None),
    "NVFP4": (WeightSpec(E2M1, GROUP_16, E4M3), ActivationSpec(E2M1, GROUP_16, dynamic=False)),
    "W4A16_NVFP4": (WeightSpec(E2M1, GROUP_16, E4M3), None),
    "MXFP8": (WeightSpec(E4M3, GROUP_32, E8M0), ActivationSpec(E4M3, GROUP_32, dynamic=True)),
}
MIXED = "MIXED_PRECISION"

_PRODUCER = {"name": "modelopt", "version": "0.47.0"}  #: whose form of the config this is; readers look for the name
_FLOAT_ARGS = {"dynamic": False, "type": "float"}


@dataclass(frozen=True)
class ModelOptWriter:
    """Writes what has a `quant_algo`, and mixtures of them."""

    name: str = NAME
    global_divides: bool = False

    def check(self, scheme: Scheme) -> None:
        """Only the combinations of weights and inputs in `ALGORITHMS` can be expressed.

        Raises:
            UsageError: Any other scheme.
        """
        _algorithm(scheme)

    def weight_tensors(self, module: str, spec: WeightSpec, shape: tuple[int, int]) -> WeightTensors:
        """``weight`` (packed where it has 4 bits) and ``weight_scale``; NVFP4 adds ``weight_scale_2``.

        Raises:
            ShapeError: Partial 128x128 blocks, which vLLM refuses, or partial groups.
        """
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
        """``input_scale``, a float32 scalar."""
        return OutputTensor(f"{module}.input_scale", "F32", ())

    def kv_scales(self, attention: str) -> tuple[OutputTensor, OutputTensor]:
        """``k_scale`` of the projection of keys and ``v_scale`` of that of values, float32 scalars."""
        return (
            OutputTensor(f"{attention}.k_proj.k_scale", "F32", ()),
            OutputTensor(f"{attention}.v_proj.v_scale", "F32", ()),
        )

    def quantization_config(
        self, modules: Mapping[str, Scheme], kept: Sequence[str], kv: KVSpec | None = None
    ) -> dict[str, Any]:
        """As ModelOpt 0.47 writes it into config.json: `config_groups` for the algorithms for which it does.

        Raises:
            UsageError: A scheme without a `quant_algo`, or an exception whose name vLLM would find in that of a
                quantized module.
        """
        algorithms = {module: _algorithm(scheme) for module, scheme in modules.items()}
        _refuse_substrings(kept, modules)
        names = sorted(set(algorithms.values()))
        config: dict[str, Any] = {}
        if len(names) == 1 and names[0] in ("FP8", "NVFP4", "W4A16_NVFP4"):
            config["config_groups"] = {"group_0": _group(names[0]) | {"targets": ["Linear"]}}
        elif len(names) > 1:
            config["config_groups"] = {
                f"group_{number}": _group(name) | {"targets": sorted(m for m, its in algorithms.items() if its == name)}
                for number, name in enumerate(names)
            }
            config["quantized_layers"] = _layers(algorithms)
        config |= {"ignore": list(kept), "quant_algo": names[0] if len(names) == 1 else MIXED}
        if kv is not None:
            config["kv_cache_scheme"] = {"num_bits": kv.element.bits} | _FLOAT_ARGS
        return config | {"producer": _PRODUCER, "quant_method": NAME}

    def extra_files(
        self, modules: Mapping[str, Scheme], kept: Sequence[str], kv: KVSpec | None = None
    ) -> dict[str, dict[str, Any]]:
        """hf_quant_config.json, which older readers look for."""
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
                "producer": _PRODUCER,
                "quantization": quantization | {"exclude_modules": list(kept)},
            }
        }


WRITER = ModelOptWriter()


def _algorithm(scheme: Scheme) -> str:
    """The `quant_algo` of a scheme.

    Raises:
        UsageError: There is none.
    """
    wanted = (scheme.weight.element, scheme.weight.granularity, scheme.weight.scale)
    inputs = scheme.activation
    if inputs is not None and scheme.weight.has_global_scale:  # in either layout: dynamic, under a static scale
        inputs = replace(inputs, dynamic=False)
    for name, (weight, activation) in ALGORITHMS.items():
        if (weight.element, weight.granularity, weight.scale) == wanted and activation == inputs:
            return name
    raise UsageError(
        f"layout {NAME!r} has no quant_algo for {scheme.name!r}, only {', '.join(ALGORITHMS)}; use compressed-tensors"
    )


def _group_size(algorithm: str) -> dict[str, int]:
    """``group_size``, where an algorithm has one."""
    granularity = ALGORITHMS[algorithm][0].granularity
    return {"group_size": granularity.cols} if granularity.rows == 1 and granularity.cols else {}


def _group(algorithm: str) -> dict[str, Any]:
    """An entry of `config_groups` without its targets; ModelOpt has none for blocks and names the algorithm instead."""
    weight, activation = ALGORITHMS[algorithm]
    if weight.granularity == BLOCK_128:
        return {"quant_algo": algorithm}
    args = _FLOAT_ARGS | {"num_bits": weight.element.bits} | _group_size(algorithm)
    channel = {"strategy": "channel"} if weight.granularity == CHANNEL else {}
    return ({} if activation is None else {"input_activations": args}) | {"weights": args | channel}


def _layers(algorithms: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`quantized_layers` of a mixture."""
    return {module: {"quant_algo": name} | _group_size(name) for module, name in algorithms.items()}


def _refuse_substrings(kept: Sequence[str], modules: Iterable[str]) -> None:
    """Refuse exceptions that vLLM would find in the names of other modules: ``mlp.gate`` in ``mlp.gate_proj``."""
    names = list(modules)
    for entry in kept:
        for module in names:
            if entry in module:
                raise UsageError(
                    f"{module} is quantized and {entry} is not: in layout {NAME!r} vLLM would find the name of the "
                    "one in that of the other and leave out both; use compressed-tensors"
                )


# ---------------------------------------------------------------------------------------------------- reading


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a ModelOpt checkpoint from its tensors; the config tells about the KV cache, and what is weight-only.

    Raises:
        ShapeError: A scale whose size fits no granularity of its weight.
        ConfigError: A quantized weight on the list of exceptions.
    """
    quantization = config.get("quantization", config)
    weights = {}
    for module, scale in tensors_with_suffix(checkpoint, ".weight_scale"):
        codes = checkpoint.tensors.get(f"{module}.weight")
        if codes is None or codes.dtype not in ("U8", "F8_E4M3"):
            continue
        element = E2M1 if codes.dtype == "U8" else E4M3
        shape = weight_shape(codes, element)
        spec = stored_spec(shape, scale, element, _granularity(scale, shape, element))
        input_scale = f"{module}.input_scale"
        algorithm = algorithm_of(quantization, module)
        weights_alone = algorithm.endswith("_WO") or "A16" in algorithm
        weights[module] = StoredWeight(
            module=module,
            spec=spec,
            shape=shape,
            codes=codes.name,
            scale=scale.name,
            global_scale=f"{module}.weight_scale_2" if spec.has_global_scale else None,
            global_divides=False,
            activation=None if weights_alone else _activation(spec, input_scale in checkpoint.tensors),
            input_scale=input_scale if input_scale in checkpoint.tensors else None,
        )
    for key in _EXCLUSIONS:
        refuse_excluded(checkpoint.path / "config.json", key, quantization.get(key), weights, by_wildcard)
    auxiliary = frozenset(name for name in checkpoint.tensors if name.endswith(_AUXILIARY))
    return Description(NAME, weights, auxiliary, _kv(quantization))


def algorithm_of(quantization: Mapping[str, Any], module: str) -> str:
    """The `quant_algo` of a module, in capitals: its own in a mixture, that of the model otherwise; "" for none."""
    layers = quantization.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, dict) else None
    found = own if isinstance(own, dict) else quantization
    return str(found.get("quant_algo") or "").upper()


def _kv(quantization: Mapping[str, Any]) -> KVSpec | None:
    """``FP8`` and ``NVFP4``, or in newer files a scheme with the bits of a float; None for whatever else there is."""
    scheme = quantization.get("kv_cache_scheme")
    bits = scheme.get("num_bits") if isinstance(scheme, dict) and scheme.get("type") == "float" else None
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm == "FP8" or bits == E4M3.bits:
        return KVSpec(E4M3, TENSOR)
    return KVSpec(E2M1, GROUP_16) if algorithm == "NVFP4" or bits == E2M1.bits else None


def _granularity(scale: TensorInfo, shape: tuple[int, int], element: ElementFormat) -> Granularity:
    """NVFP4 scales are E4M3 per 16, MX scales are E8M0 per 32, float scales per tensor, channel or block."""
    if scale.dtype == "F8_E4M3":
        return GROUP_16
    if scale.dtype in ("U8", "F8_E8M0") or element is E2M1:
        return GROUP_32
    return granularity_of(scale, shape, BLOCK_128 if len(scale.shape) > 1 else None)


def _activation(spec: WeightSpec, has_input_scale: bool) -> ActivationSpec | None:
    """A static input scale means W8A8 or W4A4; without one, 8-bit inputs are quantized as they come."""
    if spec.element is E2M1:
        return ActivationSpec(E2M1, GROUP_16, dynamic=False) if has_input_scale else None
    if has_input_scale:
        return ActivationSpec(E4M3, TENSOR, dynamic=False)
    return ActivationSpec(E4M3, GROUP_32 if spec.granularity == GROUP_32 else TOKEN, dynamic=True)
