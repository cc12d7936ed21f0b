"""Quantizing the inputs of a linear as W8A8 servers do it at run time, in plain torch: the oracle of that half.

An input ``x [..., K]`` is a matrix ``[M, K]`` of tokens here, with the scale grid of the granularity: one scale in all
(static, from calibration, or dynamic), one per token, or one per token and group of columns. Numbers are
those of compressed-tensors, bit for bit in float32: the scale is ``amax / E4M3.max``, the code ``encode(x / scale)``
with a true division, clamped, ties to even.

Where servers differ from that, they differ from each other. vLLM's per-token kernel lets no scale fall below
``1 / (512 * E4M3.max)`` and its group kernel no amax below 1e-10, which changes tokens of nearly nothing only; some
kernels multiply by the reciprocal of the scale, which moves a code by one step where ``x / scale`` lies within a
float32 rounding of a tie.

Left out: the inputs of MX and NVFP4 weights. Their scales are powers of two that every server rounds by a rule of its
own, or lie under a second, static scale; such weights are computed weight-only.

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
    """The spec in words, for example ``"E4M3 per token (dynamic)"``."""
    return f"{spec.element.name} per {spec.granularity} ({'dynamic' if spec.dynamic else 'static'})"


def can_quantize(spec: ActivationSpec, weight: WeightSpec) -> bool:
    """Whether this module computes what servers compute for such inputs of such a weight.

    The weight counts because a checkpoint does not say what the scales of activations are: they are what those of the
    weight are, float32 here.
    """
    return _is_covered(spec) and weight.element is E4M3 and weight.scale is FLOAT32


def check_activation(spec: ActivationSpec, scale: Tensor | None) -> None:
    """See that `quantize_activation` may take its arguments.

    Raises:
        UnsupportedTensorError: As there.
        ValueError: As there.
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
    """Quantize an input.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        spec: E4M3; per tensor (static or dynamic), per token or per group of columns (dynamic). The last group of a
            row may be partial.
        scale: float32, one positive element; given exactly where the spec is static.

    Returns:
        uint8 codes of the shape of `x`, and the float32 scale grid ``spec.granularity.scale_shape((M, K))`` for the M
        tokens of `x`. A token (or group) of zeros has the scale 2**-23 and codes of zero. With a dynamic scale, NaN or
        Inf in a block makes all of it NaN; with a static one Inf is clamped, as a server would, and NaN stays NaN.

    Raises:
        UnsupportedTensorError: Another element or granularity.
        ValueError: `scale` is given for a dynamic spec or missing for a static one.

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
    """What the codes stand for: decoded element times scale, rounded to float32.

    Args:
        codes: uint8 ``[..., K]`` of `quantize_activation`.
        scale: The grid that came with them.
        spec: How they were quantized.

    Returns:
        float32, the shape of `codes`.
    """
    shape = _token_shape(codes)
    values = decode(codes.reshape(shape), spec.element)
    return values.mul_(expand(scale, spec.granularity, shape)).reshape(codes.shape)


def _is_covered(spec: ActivationSpec) -> bool:
    """E4M3 per tensor, or per token or group of its columns with dynamic scales."""
    return spec.element is E4M3 and (spec.granularity == TENSOR or (spec.dynamic and spec.granularity.rows == 1))


def _token_shape(x: Tensor) -> tuple[int, int]:
    """``(M, K)`` of ``[..., K]``."""
    return math.prod(x.shape[:-1]), x.shape[-1]
