"""Plain-torch reference of the scales that follow from the amax of a block.

Every fast kernel must equal it bit for bit. Every operation is one IEEE float32 operation, or integer arithmetic on its
bits, in a stated order, so that vector code can repeat it exactly: no log2, no fused multiply-add, no sum of unstated
order. A scale grid has two dimensions, as `Granularity` describes; blocks at the right and bottom edge may be partial.
All scales multiply to dequantize, except the global float32 divisor of NVFP4, which divides, as in compressed-tensors
checkpoints.

`numerics.scale_search` improves scales with the elements of a block; `numerics.scale` chooses by the rule of a scheme.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import encode
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import Granularity
from minifloat.numerics.scheme import ScaleRule

_MANTISSA_MASK = (1 << FLOAT32.mantissa_bits) - 1


def amax(w: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude in every block.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        granularity: The blocks.

    Returns:
        float32 ``granularity.scale_shape((N, K))``, exact; NaN for a block that holds NaN.
    """
    return blocks_of(w, granularity).abs().amax(dim=(1, 3)).to(torch.float32)


def expand(grid: Tensor, granularity: Granularity, shape: tuple[int, int]) -> Tensor:
    """Repeat the scale of each block over its elements.

    Args:
        grid: One value per block, any dtype.
        granularity: The blocks.
        shape: ``(N, K)`` of the matrix.

    Returns:
        ``[N, K]`` in the dtype of `grid`.
    """
    expected = granularity.scale_shape(shape)
    if tuple(grid.shape) != expected:
        raise ValueError(f"{granularity} scales of {shape} have the shape {expected}, got {tuple(grid.shape)}")
    rows, cols = granularity.block(shape)
    full = grid[:, None, :, None].expand(-1, rows, -1, cols).reshape(expected[0] * rows, expected[1] * cols)
    return full[: shape[0], : shape[1]]


def blocks_of(w: Tensor, granularity: Granularity) -> Tensor:
    """Return `w` padded with zeros to whole blocks, as ``[grid rows, block rows, grid cols, block cols]``."""
    if w.ndim != 2:
        raise ValueError(f"expected a matrix [N, K], got the shape {tuple(w.shape)}")
    shape = (w.shape[0], w.shape[1])
    (grid_rows, grid_cols), (rows, cols) = granularity.scale_shape(shape), granularity.block(shape)
    padding = (0, grid_cols * cols - shape[1], 0, grid_rows * rows - shape[0])
    return torch.nn.functional.pad(w, padding).view(grid_rows, rows, grid_cols, cols)


def global_divisor(tensor_amax: Tensor) -> Tensor:
    """Return the float32 by which NVFP4 divides the block scales of a tensor: a power of two.

    It is the largest power of two that is at most ``E4M3.max * E2M1.max / amax``. The largest block scale is therefore
    in the upper half of E4M3's range, and the reciprocal, which some layouts store, is exact. The quotient is computed
    as the float32 reciprocal of amax times the constant (two roundings), as compressed-tensors computes its divisor.

    Args:
        tensor_amax: float32, one element; amax of the tensor, or of all tensors that share the divisor.

    Returns:
        float32 scalar (no dimensions); 1.0 if the quotient is not finite (amax zero, below 8e-36, or NaN).

    Source: compressed-tensors 0.20, `generate_gparam`.
    """
    if tensor_amax.numel() != 1:
        raise ValueError(f"the divisor needs the amax of one tensor, got the shape {tuple(tensor_amax.shape)}")
    clamped = tensor_amax.reshape(()).to(torch.float32).clamp(min=FLOAT32.min_normal)
    quotient = clamped.reciprocal() * (E4M3.max * E2M1.max)
    power = torch.ldexp(torch.tensor(0.5, device=quotient.device), torch.frexp(quotient).exponent)
    return torch.where(torch.isfinite(quotient), power, 1.0)


def float_scales(amax_grid: Tensor, element: ElementFormat) -> Tensor:
    """Return float32 scales, ``amax / element.max`` rounded to nearest.

    Args:
        amax_grid: float32, any shape, >= 0.
        element: Format of the elements.

    Returns:
        float32, never zero and never subnormal. A block of zeros gets the machine epsilon 2**-23, as in
        compressed-tensors. Any other block gets at least the smallest normal float32, because a server that flushes
        subnormals would otherwise divide or multiply by zero.
    """
    scale = (amax_grid / _constant(element.max, amax_grid)).clamp(min=FLOAT32.min_normal)
    return torch.where(amax_grid == 0, _epsilon(FLOAT32), scale)


def nvfp4_scales(amax_grid: Tensor, divisor: Tensor) -> Tensor:
    """Return the block scales of NVFP4, ``divisor * (amax / E2M1.max)`` rounded to E4M3.

    Args:
        amax_grid: float32, any shape, >= 0.
        divisor: float32 scalar of `global_divisor`.

    Returns:
        uint8 E4M3 codes, none of them of zero. A block of zeros gets E4M3's machine epsilon 0.125, as in
        compressed-tensors. A block whose scale would round to zero gets the smallest subnormal; compressed-tensors
        writes 0.125 there, which flushes the block to zero.
    """
    codes = encode(divisor * (amax_grid / _constant(E2M1.max, amax_grid)), E4M3)
    codes = codes.clamp(min=1)
    return torch.where(amax_grid == 0, encode(_constant(_epsilon(E4M3), amax_grid), E4M3), codes)


def e8m0_scales(amax_grid: Tensor, element: ElementFormat, rule: ScaleRule) -> Tensor:
    """Return power-of-two scales, computed by exponent arithmetic on the bits of float32.

    Let field(x) be the exponent field of a float32, so field(x) - 127 = floor(log2 x) for normal x; E8M0 has the same
    bias. FLOOR is ``field(amax) - emax``. EVEN adds half of the element's last mantissa bit to the bits of amax first,
    so that a mantissa of at least ``2 - 2**-(mantissa_bits + 1)`` counts for the next power of two. RCEIL is
    ``field(r)``, plus one when the mantissa of r is not zero, with ``r = amax / element.max`` rounded to float32.

    A subnormal has field 0. For FLOOR and EVEN the result clamps to code 0, as with the exact exponent. RCEIL gives
    code 1 for a subnormal r, even below 2**-127 where code 0 would suffice; neither code clips a value.

    Args:
        amax_grid: float32, any shape, >= 0.
        element: Format of the elements.
        rule: FLOOR, EVEN or RCEIL.

    Returns:
        uint8 E8M0 codes, clamped to 0..254; 0 for a block of zeros.

    Source: OCP MX 1.0, section 6.3 (FLOOR); Quark and torchao (EVEN); NVIDIA's MXFP8 recipe (RCEIL).
    """
    bits = amax_grid.view(torch.int32)
    if rule is ScaleRule.FLOOR:
        code = _exponent_field(bits) - element.emax
    elif rule is ScaleRule.EVEN:
        half = 1 << (FLOAT32.mantissa_bits - element.mantissa_bits - 1)
        code = _exponent_field(bits + half) - element.emax
    elif rule is ScaleRule.RCEIL:
        bits = (amax_grid / _constant(element.max, amax_grid)).view(torch.int32)
        code = _exponent_field(bits) + (bits & _MANTISSA_MASK != 0)
    else:
        raise ValueError(f"{rule} does not derive an E8M0 scale from amax; use FLOOR, EVEN or RCEIL")
    return code.clamp(0, E8M0.max_code).to(torch.uint8)


def _exponent_field(bits: Tensor) -> Tensor:
    """Return the biased exponent of non-negative float32 bits (int32)."""
    return bits >> FLOAT32.mantissa_bits


def _epsilon(fmt: ElementFormat) -> float:
    """Return the distance from 1.0 to the next larger value of `fmt`."""
    return 2.0**-fmt.mantissa_bits


def _constant(value: float, like: Tensor) -> Tensor:
    """Return a float32 scalar on the device of `like`.

    Dividing by a Python number would multiply by its reciprocal on CUDA. The scalar is created on the device, without a
    copy from the host, so that the calculation can be captured in a CUDA graph.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)
