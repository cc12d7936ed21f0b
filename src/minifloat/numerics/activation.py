"""Plain-torch reference of quantizing the inputs of a linear at run time, as W8A8, W4A8 and W4A4 servers do.

Codes are ``encode(x / scale)`` with a true division. FLOAT32 scales are ``amax / element.max``, per token, group or
whole input; E8M0 and E4M3 ones (MX, NVFP4) see `mx_input_scales` and `nvfp4_input_scales`. Results equal those of
compressed-tensors bit for bit in float32, except for the sign of zeros. Servers differ for tokens close to zero (vLLM
bounds scales from below), at ties (reciprocals) and in how they round the exponents of MX inputs.

Source: compressed-tensors 0.20, `compute_dynamic_scales_and_zp`, `fake_quantize`; vLLM, `scaled_fp8_quant`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minifloat.errors import UnsupportedTensorError
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import GROUP_16, GROUP_32, TENSOR
from minifloat.numerics.scale_rules import amax, e8m0_scales, expand, float_scales, global_divisor
from minifloat.numerics.scheme import ActivationSpec, ScaleRule, WeightSpec

#: Code of E4M3's machine epsilon, the scale of a block whose scale would be zero.
_E4M3_EPSILON = (E4M3.bias - E4M3.mantissa_bits) << E4M3.mantissa_bits
_E8M0_NAN = E8M0.max_code + 1


def can_quantize(spec: ActivationSpec, weight: WeightSpec) -> bool:
    """Return whether this module computes what servers compute for inputs in `spec` of a weight in `weight`."""
    # DeepSeek's layout does not state that servers round the scales of inputs to E8M0 beside E8M0 weights
    implied = spec.scale is FLOAT32 and weight.scale is not FLOAT32 and weight.element is E4M3
    return _is_covered(spec) and not implied


def check_activation(spec: ActivationSpec, scale: Tensor | None) -> None:
    """Check the arguments of `quantize_activation`."""
    if not _is_covered(spec):
        raise UnsupportedTensorError(
            "x",
            f"inputs in {spec} are not simulated; expected E4M3 per tensor, or dynamic per token "
            "or group, or the inputs of MXFP8, MXFP4 or NVFP4; run this weight-only",
        )
    if spec.needs_calibration != (scale is not None):
        raise ValueError(f"{spec}: {'needs a' if scale is None else 'takes no'} scale")


def quantize_activation(x: Tensor, spec: ActivationSpec, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return uint8 codes of the shape of `x`, one per byte, and the float32 scale grid of its M tokens.

    `scale` is the scale of a static spec, or the divisor of E4M3 scales. Zeros get the scale 2**-23 (E8M0: 2**-127,
    E4M3: 0.125 / divisor). NaN or Inf makes a block with a dynamic scale NaN; under a static scale Inf is clamped.
    """
    check_activation(spec, scale)
    shape = _token_shape(x)
    tokens = x.reshape(shape).float()
    grid = input_scales(tokens, spec, scale)
    quotient = tokens / expand(grid, spec.granularity, shape)
    if spec.element.nan_code is None:
        quotient = torch.where(quotient.isnan(), 0.0, quotient)  # the scale is NaN
    return encode(quotient, spec.element).reshape(x.shape), grid


def dequantize_activation(codes: Tensor, scale: Tensor, spec: ActivationSpec) -> Tensor:
    """Return decoded element times scale, float32."""
    shape = _token_shape(codes)
    values = decode(codes.reshape(shape), spec.element)
    return values.mul_(expand(scale, spec.granularity, shape)).reshape(codes.shape)


def static_scale(spec: ActivationSpec, largest: Tensor) -> Tensor:
    """Return the scale of a static spec, or the divisor of E4M3 scales, of inputs with this amax."""
    return global_divisor(largest) if spec.has_global_scale else float_scales(largest, spec.element)


def input_scales(tokens: Tensor, spec: ActivationSpec, scale: Tensor | None) -> Tensor:
    """Return the float32 scale grid of tokens, float32 ``[M, K]``; arguments as of `quantize_activation`."""
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
    """Return E8M0 codes by the rule EVEN of E2M1, whatever the element, as compressed-tensors' `generate_mx_scales`."""
    code = e8m0_scales(amax_grid, E2M1, ScaleRule.EVEN).to(torch.int32) + (E2M1.emax - element.emax)
    return torch.where(amax_grid.isfinite(), code.clamp(min=0), _E8M0_NAN).to(torch.uint8)


def nvfp4_input_scales(amax_grid: Tensor, divisor: Tensor) -> Tensor:
    """Return E4M3 codes of ``divisor * (amax / E2M1.max)``; zero becomes 0.125, as in `calculate_qparams`."""
    largest = torch.full((), E2M1.max, dtype=torch.float32, device=amax_grid.device)
    codes = encode(divisor * (amax_grid / largest), E4M3)
    return torch.where(codes == 0, _E4M3_EPSILON, codes)


def _is_covered(spec: ActivationSpec) -> bool:
    if spec.scale is E8M0:
        return spec.element in (E4M3, E2M1) and spec.granularity == GROUP_32 and spec.dynamic
    if spec.scale is E4M3:
        return spec.element is E2M1 and spec.granularity == GROUP_16 and spec.dynamic
    in_rows = spec.dynamic and spec.granularity.rows == 1
    return spec.scale is FLOAT32 and spec.element is E4M3 and (spec.granularity == TENSOR or in_rows)


def _token_shape(x: Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]
