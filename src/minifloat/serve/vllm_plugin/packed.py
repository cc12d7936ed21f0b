"""Packs the weight of one of vLLM's layers after loading, and multiplies with it.

A layer keeps the packed bytes as its parameter ``weight``, so that they count, move and are traced as its weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minifloat.errors import ShapeError
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import PackedWeight, pack, why_not
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.granularity import CHANNEL, GROUP_16, GROUP_32, TENSOR, Granularity
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

MXFP8 = WeightSpec(E4M3, GROUP_32, E8M0)
MXFP4 = WeightSpec(E2M1, GROUP_32, E8M0)
NVFP4 = WeightSpec(E2M1, GROUP_16, E4M3)

_PACKED = "minifloat_weight"
#: Set by vLLM on a layer whose weight latent attention reads as the checkpoint stores it.
_READ_ELSEWHERE = "_cpu_skip_gemm_dispatch"
#: Parameters of layers that the packed weight replaces.
_REPLACED = ("weight", "weight_scale", "weight_scale_inv", "weight_global_scale", "input_scale", "input_global_scale")


def fp8(codes: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> QuantizedTensor:
    shape = (codes.shape[0], codes.shape[1])
    if block is not None:
        granularity = Granularity(f"block {block[0]}x{block[1]}", *block)
    elif scale.numel() in (1, shape[0]):
        granularity = TENSOR if scale.numel() == 1 else CHANNEL
    else:
        raise ShapeError("weight_scale", f"expected 1 or {shape[0]} scales for a weight {shape}, got {scale.numel()}")
    if scale.dtype in (torch.float8_e8m0fnu, torch.uint8):
        spec, scale = WeightSpec(E4M3, granularity, E8M0), scale.view(torch.uint8)
    else:
        spec, scale = WeightSpec(E4M3, granularity), scale.float()
    return QuantizedTensor(spec, shape, codes.view(torch.uint8), scale.reshape(granularity.scale_shape(shape)))


def mxfp8(codes: Tensor, scale: Tensor) -> QuantizedTensor:
    """Return an MXFP8 weight: codes float8_e4m3fn ``[N, K]``, scales uint8 ``[N, K / 32]``."""
    return QuantizedTensor(MXFP8, (codes.shape[0], codes.shape[1]), codes.view(torch.uint8), scale.view(torch.uint8))


def mxfp4(codes: Tensor, scale: Tensor) -> QuantizedTensor:
    """Return an MXFP4 weight: codes uint8 ``[N, K / 2]``, scales uint8 ``[N, K / 32]``."""
    return QuantizedTensor(MXFP4, (codes.shape[0], 2 * codes.shape[1]), codes, scale.view(torch.uint8))


def nvfp4(codes: Tensor, scale: Tensor, tensor_scale: Tensor) -> QuantizedTensor:
    shape = (codes.shape[0], 2 * codes.shape[1])
    return QuantizedTensor(NVFP4, shape, codes, scale.view(torch.uint8), tensor_scale.reshape(()), global_divides=False)


def is_read_elsewhere(layer: Any) -> bool:
    """Return whether vLLM reads the weight of a layer as the checkpoint stores it."""
    return bool(getattr(layer, _READ_ELSEWHERE, False))


def is_bf16_matrix(weight: Tensor) -> bool:
    """Return whether `hold` takes an unquantized weight."""
    return weight.dtype == torch.bfloat16 and not why_not(None, tuple(weight.shape), weight.device, weight.dtype)


def is_held(layer: Any) -> bool:
    return hasattr(layer, _PACKED)


def hold(layer: Any, weight: QuantizedTensor | Tensor, *, keep: bool = False) -> None:
    """Pack a weight and put it into a layer, in the place of the parameters that the checkpoint has filled."""
    packed = pack(weight)
    if not keep and not is_read_elsewhere(layer):
        for name in _REPLACED:
            if name in layer._parameters:
                delattr(layer, name)
        layer.weight = nn.Parameter(packed.data, requires_grad=False)
    setattr(layer, _PACKED, packed)


def multiply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for a layer that `hold` was called for: ``[..., K]`` to ``[..., N]``."""
    packed: PackedWeight = getattr(layer, _PACKED)
    if torch.compiler.is_compiling():
        biases = [] if bias is None else [bias]
        y: Tensor = torch.ops.minifloat.linear(x, [packed.data], biases, [packed.shape[0]])
        return y
    return linear(x, packed, bias)
