"""NVIDIA ModelOpt's unified Hugging Face export: FP8, NVFP4, MXFP8 and mixtures of them. Read only.

The config names an algorithm for the whole model, but a mixed export differs by layer, so each weight is told from
its own tensors: the dtype of the codes, the dtype and size of the scale, and `weight_scale_2` (NVFP4), which
multiplies. An E2M1 weight is uint8 ``[N, K / 2]`` under the name ``weight``.

Source: ModelOpt 0.47, `export/quant_utils.py` and `hf_quant_config.json` as written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.formats import E2M1, E4M3, ElementFormat
from minifloat.granularity import BLOCK_128, GROUP_16, GROUP_32, TENSOR, TOKEN, Granularity
from minifloat.layouts.fp8 import granularity_of
from minifloat.layouts.stored import Description, StoredWeight, stored_spec, weight_shape
from minifloat.scheme import ActivationSpec, KVSpec, WeightSpec

NAME = "modelopt"

_AUXILIARY = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def describe(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Description:
    """Describe a ModelOpt checkpoint from its tensors; the config tells about the KV cache, and what is weight-only.

    Raises:
        ShapeError: A scale whose size fits no granularity of its weight.
    """
    quantization = config.get("quantization", config)
    algorithm = str(quantization.get("quant_algo") or "").upper()
    weights_alone = algorithm.endswith("_WO") or "A16" in algorithm
    weights = {}
    for name, scale in checkpoint.tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        codes = checkpoint.tensors.get(f"{module}.weight")
        if codes is None or codes.dtype not in ("U8", "F8_E4M3"):
            continue
        element = E2M1 if codes.dtype == "U8" else E4M3
        shape = weight_shape(codes, element)
        spec = stored_spec(shape, scale, element, _granularity(scale, shape, element))
        input_scale = f"{module}.input_scale"
        weights[module] = StoredWeight(
            module=module,
            spec=spec,
            shape=shape,
            codes=codes.name,
            scale=name,
            global_scale=f"{module}.weight_scale_2" if spec.has_global_scale else None,
            global_divides=False,
            activation=None if weights_alone else _activation(spec, input_scale in checkpoint.tensors),
            input_scale=input_scale if input_scale in checkpoint.tensors else None,
        )
    auxiliary = frozenset(name for name in checkpoint.tensors if name.endswith(_AUXILIARY))
    return Description(NAME, weights, auxiliary, _kv(quantization))


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
