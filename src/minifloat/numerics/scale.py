"""Plain-torch reference of choosing the scales of a weight; every fast kernel must equal it bit for bit.

Every operation is one IEEE float32 operation, or integer arithmetic on its bits, in a stated order, so that vector
code can repeat it exactly: no log2, no fused multiply-add, no sum of unstated order. A scale grid has two dimensions,
as `Granularity` describes; blocks at the right and bottom edge may be partial. All scales multiply to dequantize,
except the global float32 divisor of NVFP4, which divides, as in compressed-tensors checkpoints.

Weights are expected to be finite, because callers refuse tensors with NaN or Inf. With such input the functions do
not raise, unless their docstring says otherwise, and their results are unspecified. The layouts define how scales are
stored; calibration chooses activation scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import TENSOR, Granularity
from minifloat.numerics.scheme import ScaleRule, WeightSpec

#: Exponents that the search tries, relative to FLOOR. In a tie the earlier exponent wins.
SEARCH_OFFSETS = (0, 1, -1)

#: E4M3 codes that the search of NVFP4 tries, relative to that of ``amax / E2M1.max``. In a tie the earlier one wins.
NVFP4_SEARCH_OFFSETS = (0, 1, -1, 2, -2, 3, 4, 5, 6)

_MANTISSA_MASK = (1 << FLOAT32.mantissa_bits) - 1


def amax(w: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude in every block.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        granularity: The blocks.

    Returns:
        float32 ``granularity.scale_shape((N, K))``, exact; NaN for a block that holds NaN.

    Raises:
        ValueError: If `w` does not have two dimensions.
    """
    return _blocks(w, granularity).abs().amax(dim=(1, 3)).to(torch.float32)


def expand(grid: Tensor, granularity: Granularity, shape: tuple[int, int]) -> Tensor:
    """Repeat the scale of each block over its elements.

    Args:
        grid: One value per block, any dtype.
        granularity: The blocks.
        shape: ``(N, K)`` of the matrix.

    Returns:
        ``[N, K]`` in the dtype of `grid`.

    Raises:
        ValueError: If `grid` does not have the shape that `granularity` gives for `shape`.
    """
    expected = granularity.scale_shape(shape)
    if tuple(grid.shape) != expected:
        raise ValueError(f"{granularity} scales of {shape} have the shape {expected}, got {tuple(grid.shape)}")
    rows, cols = granularity.block(shape)
    full = grid[:, None, :, None].expand(-1, rows, -1, cols).reshape(expected[0] * rows, expected[1] * cols)
    return full[: shape[0], : shape[1]]


def global_divisor(tensor_amax: Tensor) -> Tensor:
    """Return the float32 by which NVFP4 divides the block scales of a tensor, ``E4M3.max * E2M1.max / amax``.

    The divisor places the largest block scale at the top of E4M3. The quotient is computed as the float32 reciprocal of
    amax times the constant (two roundings): compressed-tensors computes it so and files must agree to the bit.

    Args:
        tensor_amax: float32, one element; amax of the tensor, or of all tensors that share the divisor.

    Returns:
        float32 scalar (no dimensions); 1.0 if the quotient is not finite (amax zero, below 8e-36, or NaN).

    Raises:
        ValueError: If `tensor_amax` does not have one element (an empty weight has no amax).

    Source: compressed-tensors 0.20, `generate_gparam`.
    """
    if tensor_amax.numel() != 1:
        raise ValueError(f"the divisor needs the amax of one tensor, got the shape {tuple(tensor_amax.shape)}")
    clamped = tensor_amax.reshape(()).to(torch.float32).clamp(min=FLOAT32.min_normal)
    quotient = clamped.reciprocal() * (E4M3.max * E2M1.max)
    return torch.where(torch.isfinite(quotient), quotient, 1.0)


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

    Raises:
        ValueError: If `rule` is another one (SEARCH needs the weights: `search_e8m0_scales`).

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


def search_e8m0_scales(w: Tensor, granularity: Granularity, element: ElementFormat) -> Tensor:
    """Return the power-of-two scale with the smallest squared error, for every block.

    The offsets k of `SEARCH_OFFSETS` are added in order to the FLOOR code f; codes below 0 are skipped, and none is
    above 254, because FLOOR subtracts the element's emax. With ``y = w * 2**-(f - 127)`` and
    ``q = decode(encode(y * 2**-k))``, the error of an element is ``d * d`` with ``d = y - q * 2**k``. The error of the
    block is the sum over its elements. A later k wins only if its sum is strictly smaller.

    Other offsets cannot win. Every value that offset +1 can represent, up to the largest value of offset 0, is also a
    value of offset 0, so +1 improves only elements close to the next power of two, and +2 improves none. With offset
    -2 the error of amax grows (for E2M1 by at least 2.5 units of FLOOR's scale, 6.25 squared) by more than the errors
    of the 31 other elements can shrink (0.25 each, 1.94 squared together).

    Vector code can repeat the search bit for bit. The scaled values y keep squares far from overflow and underflow for
    any magnitude of the weights. Multiplying by a power of two is exact (y underflows only where its square is zero
    anyway). ``d * d`` is rounded before it is added (no fused multiply-add). The sum is a fixed tree, which adds the
    upper half of a block to its lower half until one number is left, whatever the width of the registers.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        granularity: Blocks of one row and a power of two of columns; a partial block is padded with zeros.
        element: Format of the elements.

    Returns:
        uint8 E8M0 codes on the scale grid; 0 for a block of zeros.

    Raises:
        ValueError: If `granularity` has other blocks, or `w` holds NaN and `element` has no NaN.

    Source: the search over neighbouring exponents is auto-round's optimised round-to-nearest, with a wider range.
    """
    blocks = _search_blocks(w, granularity)
    floor = e8m0_scales(blocks.abs().amax(dim=-1), element, ScaleRule.FLOOR).to(torch.int32)
    y = blocks * decode((2 * E8M0.bias - floor).to(torch.uint8), E8M0)[..., None]
    best_code = floor
    best_error = _block_error(y, SEARCH_OFFSETS[0], element)
    for offset in SEARCH_OFFSETS[1:]:
        code = floor + offset
        error = _block_error(y, offset, element)
        better = (error < best_error) & (code >= 0)
        best_code = torch.where(better, code, best_code)
        best_error = torch.where(better, error, best_error)
    return best_code.to(torch.uint8)


def search_nvfp4_scales(w: Tensor, granularity: Granularity, divisor: Tensor) -> Tensor:
    """Return the E4M3 block scale with the smallest squared error, for every block.

    The offsets of `NVFP4_SEARCH_OFFSETS` are added in order to the code of `nvfp4_scales`; the sums are clamped to the
    codes from the smallest subnormal to the largest finite value. With ``x = w * divisor``, ``c`` the value of a code,
    ``y = x * (1 / c)`` and ``q = decode(encode(y))``, the error of an element is ``d * d`` with ``d = y - q``, and the
    error of the block is the sum over its elements times ``c * c``. A later code wins only if its error is strictly
    smaller. The divisor is that of `global_divisor`; the block of the tensor's amax therefore has the largest code
    already and can only move down.

    The offsets reach from 0.77 to 1.75 times the scale of amax; 1.5 times is the second scale of Four Over Six, which
    maps amax to 4 instead of 6. Offsets of 8 and more cannot win among normal codes: eight codes are one power of two,
    and every multiple of E2M1 by twice a scale, up to the largest multiple by the scale itself, is also one by the
    scale. Offsets of -3 and less, and 7, are left out: one block in 5,000 to 15,000 (normal weights and two language
    models) would win by one of them, which would lower the squared error of all blocks together by 0.001%.

    A divisor with headroom above amax (``E4M3.max * E2M1.max / 1.5``, as Four Over Six has it) lowers the squared error
    by a further 0.2% to 0.4% on normal weights and on the same two models, where the search itself lowers it by 27%.
    The divisor stays that of compressed-tensors.

    Vector code can repeat the search bit for bit, as it can `search_e8m0_scales`: ``1 / c`` is one division, ``c * c``
    is exact, ``d * d`` is rounded before it is added, and the sum is the same fixed tree. The products x are at most
    ``E4M3.max * E2M1.max`` and a rounding, so that squares do not overflow.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        granularity: Blocks of one row and a power of two of columns; a partial block is padded with zeros.
        divisor: float32 scalar of `global_divisor`.

    Returns:
        uint8 E4M3 codes on the scale grid, none of them of zero. A block of zeros gets 0.125, as from `nvfp4_scales`.

    Raises:
        ValueError: If `granularity` has other blocks, or `w` holds NaN.

    Source: Four Over Six (arXiv 2512.02010) proposes the choice between the scales of amax / 6 and amax / 4.
    """
    blocks = _search_blocks(w, granularity)
    first = nvfp4_scales(blocks.abs().amax(dim=-1), divisor).to(torch.int32)
    x = blocks * divisor
    best_code = first
    best_error: Tensor | None = None
    for offset in NVFP4_SEARCH_OFFSETS:
        code = (first + offset).clamp(1, E4M3.max_code)
        value = decode(code.to(torch.uint8), E4M3)
        error = _block_error(x * (1.0 / value)[..., None], 0, E2M1) * (value * value)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_code = torch.where(better, code, best_code)
        best_error = torch.where(better, error, best_error)
    return best_code.to(torch.uint8)


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

    Raises:
        ValueError: If `w` does not have two dimensions, or the rule of the spec does not apply to its scale format.
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

    Raises:
        ValueError: If the spec needs a divisor and `divisor` is None, or the spec has none and `divisor` is given.
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


def _blocks(w: Tensor, granularity: Granularity) -> Tensor:
    """Return `w` padded with zeros to whole blocks, as ``[grid rows, block rows, grid cols, block cols]``."""
    if w.ndim != 2:
        raise ValueError(f"expected a matrix [N, K], got the shape {tuple(w.shape)}")
    shape = (w.shape[0], w.shape[1])
    (grid_rows, grid_cols), (rows, cols) = granularity.scale_shape(shape), granularity.block(shape)
    padding = (0, grid_cols * cols - shape[1], 0, grid_rows * rows - shape[0])
    return torch.nn.functional.pad(w, padding).view(grid_rows, rows, grid_cols, cols)


def _search_blocks(w: Tensor, granularity: Granularity) -> Tensor:
    """Return `w` as float32 ``[N, groups, cols]``; raise ValueError for blocks that a search cannot sum as a tree."""
    cols = granularity.cols
    if granularity.rows != 1 or cols is None or cols & (cols - 1):
        raise ValueError(f"the search needs blocks of one row and a power of two of columns, got {granularity}")
    return _blocks(w.to(torch.float32), granularity).squeeze(1)


def _block_error(y: Tensor, offset: int, element: ElementFormat) -> Tensor:
    """Return the squared error of blocks ``y [..., cols]`` with the scale ``2**offset``, summed by the fixed tree."""
    step = 2.0**offset
    d = y - decode(encode(y / step, element), element) * step
    error = d * d
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)


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
