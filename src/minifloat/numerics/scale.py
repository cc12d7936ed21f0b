"""Scales of a weight by the rule of its scheme, what they multiply to, and the error of the cast; plain torch.

Every fast kernel must equal these functions bit for bit. `numerics.scale_rules` and `numerics.scale_search` compute the
scales. Weights are expected to be finite, because callers refuse tensors with NaN or Inf. With such input the functions
do not raise, unless their docstring says otherwise, and their results are unspecified. The layouts define how scales
are stored; calibration chooses activation scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import amax, e8m0_scales, expand, float_scales, global_divisor, nvfp4_scales
from minifloat.numerics.scale_search import search_e8m0_scales, search_nvfp4_scales
from minifloat.numerics.scheme import ScaleRule, WeightSpec


def choose_scales(w: Tensor, spec: WeightSpec, tensor_amax: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the scales of a weight as its scheme stores them.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        spec: Storage format of the weight.
        tensor_amax: amax of the whole tensor, for specs that need one (per-tensor scales, NVFP4's divisor); by default
            that of `w`. For tensors that share a scale (q/k/v, gate/up) the maximum over all of them, for a slab of
            rows that of the whole tensor. Other specs ignore it.

    Returns:
        The scale grid (float32 values for FLOAT32 scales, uint8 codes for E8M0 and E4M3), and NVFP4's divisor (float32
        scalar) or None.
    """
    if spec.scale is E8M0 and spec.rule is ScaleRule.SEARCH:
        return search_e8m0_scales(w, spec.granularity, spec.element), None
    if spec.granularity == TENSOR and tensor_amax is not None:
        grid = tensor_amax.to(torch.float32).reshape(1, 1)
    else:
        grid = amax(w, spec.granularity)
    if spec.scale is E8M0:
        return e8m0_scales(grid, spec.element, spec.rule), None
    if spec.scale is FLOAT32 and spec.rule is ScaleRule.AMAX:
        return float_scales(grid, spec.element), None
    if spec.scale is not E4M3 or spec.rule not in (ScaleRule.AMAX, ScaleRule.SEARCH):
        raise ValueError(f"no way to choose {spec.scale.name} scales by {spec.rule}")
    divisor = global_divisor(amax(w, TENSOR) if tensor_amax is None else tensor_amax)
    if spec.rule is ScaleRule.SEARCH:
        return search_nvfp4_scales(w, spec.granularity, divisor), divisor
    return nvfp4_scales(grid, divisor), divisor


def effective_scale(scale: Tensor, spec: WeightSpec, divisor: Tensor | None = None) -> Tensor:
    """Return the float32 scales that dequantize, ``w = decode(codes) * expand(effective_scale)``.

    Quantizing divides by the same scales, ``codes = encode(w.float() / expand(effective_scale))``.

    Args:
        scale: The grid as `choose_scales` returns it.
        spec: Storage format of the weight.
        divisor: NVFP4's float32 scalar; the decoded block scale divided by it is rounded to float32.

    Returns:
        float32 of the shape of `scale`; powers of two for E8M0 (code 0 is 2**-127, a float32 subnormal).
    """
    if spec.has_global_scale != (divisor is not None):
        raise ValueError(f"{spec.scale.name} scales {'need a' if divisor is None else 'take no'} divisor")
    if spec.scale is FLOAT32:
        return scale
    values = decode(scale, spec.scale)
    return values if divisor is None else values / divisor


def cast_stats(w: Tensor, codes: Tensor, scale: Tensor, spec: WeightSpec) -> CastStats:
    """Return the error statistics of the cast of one weight.

    An element is saturated if ``|w / s|`` exceeds the largest value by more than half the step there, so that rounding
    alone would have exceeded the range of the format. An element is flushed if it is not zero and its code decodes to
    zero. Sums are computed in float64, over the dequantized float32 ``decode(codes) * s``.

    Args:
        w: ``[N, K]``, the weight before the cast.
        codes: uint8 ``[N, K]``, one code per byte.
        scale: float32 grid of `effective_scale`.
        spec: Storage format of the weight.

    Returns:
        The statistics; statistics of several tensors are added with ``+``.
    """
    element = spec.element
    w = w.to(torch.float32)
    shape = (w.shape[0], w.shape[1])
    full = expand(scale, spec.granularity, shape)
    values = decode(codes, element)
    limit = element.max + 2.0 ** (element.emax - element.mantissa_bits - 1)
    return CastStats(
        elements=w.numel(),
        signal=float(w.double().square().sum()),
        noise=float((w.double() - (values * full).double()).square().sum()),
        saturated=int(((w / full).abs() > limit).sum()),
        flushed=int(((w != 0) & (values == 0)).sum()),
    )
