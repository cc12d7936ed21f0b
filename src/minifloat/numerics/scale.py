"""Scales of a weight by the rule of its scheme, and the error of the cast; kernels equal them bit for bit.

Callers refuse NaN and Inf before; with them the results are unspecified.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import (
    amax,
    e8m0_scales,
    expand,
    float_scales,
    global_divisor,
    nvfp4_scales,
    search_e8m0_scales,
    search_nvfp4_scales,
)
from minifloat.numerics.scheme import ScaleRule, WeightSpec


def choose_scales(w: Tensor, spec: WeightSpec, tensor_amax: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return the scale grid as stored (float32 values, or codes), and NVFP4's divisor or None.

    `tensor_amax` is that of all tensors that share a scale (q/k/v), or of the whole tensor if `w` is a slab of it.
    """
    if spec.scale is E8M0 and spec.rule is ScaleRule.SEARCH:
        return search_e8m0_scales(w, spec.granularity, spec.element), None
    if spec.granularity == TENSOR and tensor_amax is not None:
        grid = tensor_amax.to(torch.float32).reshape(1, 1)
    else:
        grid = amax(w, spec.granularity)
    if spec.scale is E8M0:
        return e8m0_scales(grid, spec.element, spec.rule), None
    if spec.scale is FLOAT32 and spec.rule in (ScaleRule.AMAX, ScaleRule.RCEIL):
        return float_scales(grid, spec.element, spec.rule), None
    if spec.scale is not E4M3 or spec.rule not in (ScaleRule.AMAX, ScaleRule.SEARCH):
        raise ValueError(f"no way to choose {spec.scale.name} scales by {spec.rule}")
    if not spec.scaled_globally:
        tensor_amax = torch.zeros((), device=w.device)
    divisor = global_divisor(amax(w, TENSOR) if tensor_amax is None else tensor_amax)
    if spec.rule is ScaleRule.SEARCH:
        return search_nvfp4_scales(w, spec.granularity, divisor), divisor
    return nvfp4_scales(grid, divisor), divisor


def effective_scale(scale: Tensor, spec: WeightSpec, divisor: Tensor | None = None) -> Tensor:
    """Return the float32 scales that dequantize, ``w = decode(codes) * expand(effective_scale)``."""
    if spec.has_global_scale != (divisor is not None):
        raise ValueError(f"{spec.scale.name} scales {'need a' if divisor is None else 'take no'} divisor")
    if spec.scale is FLOAT32:
        return scale
    values = decode(scale, spec.scale)
    return values if divisor is None else values / divisor


def cast_stats(w: Tensor, codes: Tensor, scale: Tensor, spec: WeightSpec) -> CastStats:
    """Return the error of the cast of a weight ``[N, K]``, by its codes and the grid of `effective_scale`."""
    element = spec.element
    w = w.to(torch.float32)
    shape = (w.shape[0], w.shape[1])
    full = expand(scale, spec.granularity, shape)
    values = decode(codes, element)
    # rounding alone would have exceeded the range
    limit = element.max + 2.0 ** (element.emax - element.mantissa_bits - 1)
    return CastStats(
        elements=w.numel(),
        signal=float(w.double().square().sum()),
        noise=float((w.double() - (values * full).double()).square().sum()),
        saturated=int(((w / full).abs() > limit).sum()),
        flushed=int(((w != 0) & (values == 0)).sum()),
    )
