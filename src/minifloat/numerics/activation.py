"""Plain-torch reference of quantizing the inputs of a linear at run time, as W8A8 servers do.

An input ``x [..., K]`` is treated as a matrix ``[M, K]`` of M tokens. Its scale grid is that of the granularity: one
scale for the whole input (static, from calibration, or dynamic), one per token, or one per token and group of columns.
Results equal those of compressed-tensors bit for bit in float32: the scale is ``amax / E4M3.max``, the code is
``encode(x / scale)`` with a true division, clamped, ties to even.

Servers differ from this reference, and from each other, in two ways. vLLM's per-token kernel uses at least
``1 / (512 * E4M3.max)`` as the scale and its group kernel at least 1e-10 as the amax; that changes only tokens close to
zero. Some kernels multiply by the reciprocal of the scale, which moves a code by one step where ``x / scale`` lies
within a float32 rounding of a tie.

Not supported: the inputs of MX and NVFP4 weights. MX scales are powers of two that every server rounds by its own rule,
and NVFP4 scales lie under a second, static scale; this package computes such weights weight-only.

Source: compressed-tensors 0.20, `compute_dynamic_scales_and_zp` and `fake_quantize`; vLLM, `scaled_fp8_quant`.
"""

from __future__ import annotations

import math

from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale import amax, expand, float_scales
from minifloat.numerics.scheme import ActivationSpec, WeightSpec


def describe_activation(spec: ActivationSpec) -> str:
    """Return the spec in words, for example ``"E4M3 per token (dynamic)"``."""
    return f"{spec.element.name} per {spec.granularity} ({'dynamic' if spec.dynamic else 'static'})"


def can_quantize(spec: ActivationSpec, weight: WeightSpec) -> bool:
    """Return whether this module computes what servers compute for inputs in `spec` of a weight in `weight`.

    The weight matters because a checkpoint does not state the format of activation scales: servers use the format of
    the weight scales, and this module supports float32 only.
    """
    return _is_covered(spec) and weight.element is E4M3 and weight.scale is FLOAT32


def check_activation(spec: ActivationSpec, scale: Tensor | None) -> None:
    """Check the arguments of `quantize_activation`.

    Args:
        spec: How the input is quantized.
        scale: The static scale, or None.

    Raises:
        UnsupportedTensorError: If the element is not E4M3, or the granularity is not supported.
        ValueError: If `scale` is given for a dynamic spec or missing for a static one.
    """
    if not _is_covered(spec):
        raise UnsupportedTensorError(
            "x",
            f"inputs in {describe_activation(spec)} are not simulated; expected E4M3 per tensor, or dynamic per token "
            "or group; run this weight-only",
        )
    if spec.dynamic != (scale is None):
        raise ValueError(f"{describe_activation(spec)}: {'takes no' if spec.dynamic else 'needs a'} scale")


def quantize_activation(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize the input of a linear.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        spec: E4M3; per tensor (static or dynamic), per token or per group of columns (dynamic). The last group of a
            row may be partial.
        scale: float32, one positive element, for a static spec; None for a dynamic one.

    Returns:
        uint8 codes of the shape of `x`, and the float32 scale grid ``spec.granularity.scale_shape((M, K))`` for the M
        tokens of `x`. A token (or group) of zeros has the scale 2**-23 and codes of zero. With a dynamic scale, NaN or
        Inf in a block makes the whole block NaN; with a static scale, Inf is clamped, as servers do, and NaN stays NaN.

    Raises:
        UnsupportedTensorError: If the element is not E4M3, or the granularity is not supported.
        ValueError: If `scale` is given for a dynamic spec or missing for a static one.

    Source: compressed-tensors 0.20, `calculate_qparams`.
    """
    check_activation(spec, scale)
    shape = _token_shape(x)
    tokens = x.reshape(shape).float()
    if scale is None:
        grid = float_scales(amax(tokens, spec.granularity), spec.element)
    else:
        grid = scale.float().reshape(1, 1).expand(spec.granularity.scale_shape(shape))
    codes = encode(tokens / expand(grid, spec.granularity, shape), spec.element)
    return codes.reshape(x.shape), grid


def dequantize_activation(codes: Tensor, scale: Tensor, spec: ActivationSpec) -> Tensor:
    """Dequantize codes: decoded element times scale, rounded to float32.

    Args:
        codes: uint8 ``[..., K]`` from `quantize_activation`.
        scale: The scale grid from the same call.
        spec: How the input was quantized.

    Returns:
        float32 of the shape of `codes`.
    """
    shape = _token_shape(codes)
    values = decode(codes.reshape(shape), spec.element)
    return values.mul_(expand(scale, spec.granularity, shape)).reshape(codes.shape)


def _is_covered(spec: ActivationSpec) -> bool:
    """Return whether `spec` is E4M3 per tensor, or dynamic E4M3 per token or per group of a token's columns."""
    return spec.element is E4M3 and (spec.granularity == TENSOR or (spec.dynamic and spec.granularity.rows == 1))


def _token_shape(x: Tensor) -> tuple[int, int]:
    """Return ``(M, K)`` for an input ``[..., K]``."""
    return math.prod(x.shape[:-1]), x.shape[-1]
