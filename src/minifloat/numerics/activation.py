"""Plain-torch reference of quantizing the inputs of a linear at run time, as W8A8, W4A8 and W4A4 servers do.

An input ``x [..., K]`` is treated as a matrix ``[M, K]`` of M tokens. Its scale grid is that of the granularity: one
scale for the whole input (static, from calibration, or dynamic), one per token, or one per token and group of columns.
Codes are ``encode(x / scale)`` with a true division, clamped, ties to even. The scale depends on its format:

- FLOAT32: ``amax / element.max``.
- E8M0 (MXFP8, MXFP4): the power of two of amax, rounded up if the mantissa of amax is at least 1.75, divided by
  ``2**element.emax``. In E4M3 nothing is clipped, because the largest value is 1.75 * 2**8. In E2M1, whose largest
  value is 1.5 * 2**2, an amax with a mantissa between 1.5 and 1.75 is clipped.
- E4M3 (NVFP4): ``divisor * (amax / E2M1.max)`` rounded to E4M3, then divided by the divisor, a static float32 number
  per input from calibration (`minifloat.numerics.divisor`).

Results equal those of compressed-tensors bit for bit in float32, except for the sign of zeros. On bfloat16 inputs
compressed-tensors rounds ``amax / element.max`` to bfloat16 for float32 and E4M3 scales; here it is float32, as in the
kernels of servers.

Servers differ from this reference, and from each other, in three ways. vLLM's per-token kernel uses at least
``1 / (512 * E4M3.max)`` as the scale and its group kernel at least 1e-10 as the amax; that changes only tokens close to
zero. Some kernels multiply by the reciprocal of the scale, which moves a code by one step where ``x / scale`` lies
within a float32 rounding of a tie. Kernels for MX inputs round the exponent by their own rules (FLOOR, EVEN or RCEIL).

Source: compressed-tensors 0.20, `compute_dynamic_scales_and_zp`, `generate_mx_scales` and `fake_quantize`; vLLM,
`scaled_fp8_quant`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import GROUP_16, GROUP_32, TENSOR
from minifloat.numerics.scale_rules import amax, e8m0_scales, expand, float_scales
from minifloat.numerics.scheme import ActivationSpec, ScaleRule, WeightSpec

#: Code of E4M3's machine epsilon, the scale of a block whose scale would be zero.
_E4M3_EPSILON = (E4M3.bias - E4M3.mantissa_bits) << E4M3.mantissa_bits
_E8M0_NAN = E8M0.max_code + 1


def describe_activation(spec: ActivationSpec) -> str:
    """Return the spec in words, for example ``"E4M3 per token (dynamic)"``."""
    return str(spec)


def can_quantize(spec: ActivationSpec, weight: WeightSpec) -> bool:
    """Return whether this module computes what servers compute for inputs in `spec` of a weight in `weight`.

    The weight matters because a checkpoint in DeepSeek's layout does not state the format of activation scales: for
    E4M3 weights with E8M0 scales, servers round the scales of the inputs to E8M0 too, by rules of their own.
    """
    implied = spec.scale is FLOAT32 and weight.scale is not FLOAT32 and weight.element is E4M3
    return _is_covered(spec) and not implied


def check_activation(spec: ActivationSpec, scale: Tensor | None) -> None:
    """Check the arguments of `quantize_activation`.

    Args:
        spec: How the input is quantized.
        scale: The static scale or the divisor, or None.
    """
    if not _is_covered(spec):
        raise UnsupportedTensorError(
            "x",
            f"inputs in {describe_activation(spec)} are not simulated; expected E4M3 per tensor, or dynamic per token "
            "or group, or the inputs of MXFP8, MXFP4 or NVFP4; run this weight-only",
        )
    if spec.needs_calibration != (scale is not None):
        raise ValueError(f"{describe_activation(spec)}: {'needs a' if scale is None else 'takes no'} scale")


def quantize_activation(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize the input of a linear.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        spec: E4M3 with float32 scales, per tensor (static or dynamic), per token or per group of columns (dynamic);
            E4M3 or E2M1 in groups of 32 columns with E8M0 scales; E2M1 in groups of 16 columns with E4M3 scales. The
            last group of a row may be partial.
        scale: float32, one positive element: the scale of a static spec, or the divisor of E4M3 scales (what
            compressed-tensors stores as ``input_global_scale``); None for other specs.

    Returns:
        uint8 codes of the shape of `x`, one per byte, and the float32 scale grid
        ``spec.granularity.scale_shape((M, K))`` for the M tokens of `x`; E8M0 and E4M3 scales are decoded and, for
        E4M3, divided by the divisor. A block of zeros has codes of zero and the scale 2**-23 (E8M0: 2**-127, E4M3:
        0.125 / divisor). With a dynamic scale, NaN in a block makes the whole block NaN, through its scale if the
        element has no NaN; with a static scale NaN stays NaN. Inf makes a block with a dynamic scale NaN; under a
        static scale or divisor it is clamped, as servers do.

    Source: compressed-tensors 0.20, `calculate_qparams`.
    """
    check_activation(spec, scale)
    shape = _token_shape(x)
    tokens = x.reshape(shape).float()
    grid = _scales(tokens, spec, scale)
    quotient = tokens / expand(grid, spec.granularity, shape)
    if spec.element.nan_code is None:
        quotient = torch.where(quotient.isnan(), 0.0, quotient)  # the scale is NaN
    return encode(quotient, spec.element).reshape(x.shape), grid


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


def _scales(tokens: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """Return the float32 scale grid of tokens ``[M, K]`` (float32)."""
    if scale is not None:
        scale = scale.to(tokens.device, torch.float32)
    if scale is not None and not spec.has_global_scale:
        rows, cols = tokens.shape
        return scale.reshape(1, 1).expand(spec.granularity.scale_shape((rows, cols)))
    largest = amax(tokens, spec.granularity)
    if spec.scale is E8M0:
        return decode(mx_input_scales(largest, spec.element), E8M0)
    if scale is None:
        return float_scales(largest, spec.element)
    return decode(nvfp4_input_scales(largest, scale.reshape(())), E4M3) / scale.reshape(())


def mx_input_scales(amax_grid: Tensor, element: ElementFormat) -> Tensor:
    """Return the power-of-two scales of MX inputs: the rule EVEN of E2M1, whatever the element, on its own exponent.

    compressed-tensors rounds the mantissa of amax to one bit, that of E2M1, for E4M3 inputs too.

    Args:
        amax_grid: float32, any shape, >= 0.
        element: Format of the elements.

    Returns:
        uint8 E8M0 codes; 0 for a block of zeros, and the code of NaN where amax is NaN or Inf.

    Source: compressed-tensors 0.20, `generate_mx_scales`.
    """
    code = e8m0_scales(amax_grid, E2M1, ScaleRule.EVEN).to(torch.int32) + (E2M1.emax - element.emax)
    return torch.where(amax_grid.isfinite(), code.clamp(min=0), _E8M0_NAN).to(torch.uint8)


def nvfp4_input_scales(amax_grid: Tensor, divisor: Tensor) -> Tensor:
    """Return the block scales of NVFP4 inputs, ``divisor * (amax / E2M1.max)`` rounded to E4M3.

    Args:
        amax_grid: float32, any shape, >= 0.
        divisor: float32 scalar.

    Returns:
        uint8 E4M3 codes, none of them of zero: a scale that rounds to zero becomes E4M3's machine epsilon 0.125, which
        flushes the block to zero. NaN stays NaN.

    Source: compressed-tensors 0.20, `calculate_qparams`.
    """
    largest = torch.full((), E2M1.max, dtype=torch.float32, device=amax_grid.device)
    codes = encode(divisor * (amax_grid / largest), E4M3)
    return torch.where(codes == 0, _E4M3_EPSILON, codes)


def _is_covered(spec: ActivationSpec) -> bool:
    """Return whether `quantize_activation` supports `spec`."""
    if spec.scale is E8M0:
        return spec.element in (E4M3, E2M1) and spec.granularity == GROUP_32 and spec.dynamic
    if spec.scale is E4M3:
        return spec.element is E2M1 and spec.granularity == GROUP_16 and spec.dynamic
    in_rows = spec.dynamic and spec.granularity.rows == 1
    return spec.scale is FLOAT32 and spec.element is E4M3 and (spec.granularity == TENSOR or in_rows)


def _token_shape(x: Tensor) -> tuple[int, int]:
    """Return ``(M, K)`` for an input ``[..., K]``."""
    return math.prod(x.shape[:-1]), x.shape[-1]
