"""Plain-torch reference of the scales that follow from the amax of a block; kernels must equal it bit for bit.

Every operation is one IEEE float32 operation, or integer arithmetic on its bits, in a stated order: no log2, no fused
multiply-add. Scales multiply to dequantize, except NVFP4's global divisor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import Granularity
from minifloat.numerics.scheme import ScaleRule

_MANTISSA_MASK = (1 << FLOAT32.mantissa_bits) - 1


def amax(w: Tensor, granularity: Granularity) -> Tensor:
    """Return the largest magnitude in every block, exact float32; NaN for a block that holds NaN."""
    return blocks_of(w, granularity).abs().amax(dim=(1, 3)).to(torch.float32)


def expand(grid: Tensor, granularity: Granularity, shape: tuple[int, int]) -> Tensor:
    """Repeat the scale of each block over its elements: ``[N, K]`` in the dtype of `grid`."""
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
    """Return `scalar_global_divisor` of the amax of one tensor."""
    if tensor_amax.numel() != 1:
        raise ValueError(f"the divisor needs the amax of one tensor, got the shape {tuple(tensor_amax.shape)}")
    return torch.full((), float(scalar_global_divisor(float(tensor_amax))), device=tensor_amax.device)


def float_scales(amax_grid: Tensor, element: ElementFormat, rule: ScaleRule = ScaleRule.AMAX) -> Tensor:
    """Return float32 scales, ``amax / element.max`` rounded to nearest, never zero and never subnormal.

    RCEIL rounds them up to powers of two.
    """
    # zeros get 2**-23, as in compressed-tensors; a server may flush subnormal scales and divide by zero
    scale = (amax_grid / _constant(element.max, amax_grid)).clamp(min=FLOAT32.min_normal)
    if rule is ScaleRule.RCEIL:
        power = ((scale.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)
        scale = torch.where(scale.isfinite(), power, scale)
    return torch.where(amax_grid == 0, _epsilon(FLOAT32), scale)


def nvfp4_scales(amax_grid: Tensor, divisor: Tensor) -> Tensor:
    """Return the block scales of NVFP4 as E4M3 codes, ``divisor * (amax / E2M1.max)``, none of them zero."""
    codes = encode(divisor * (amax_grid / _constant(E2M1.max, amax_grid)), E4M3)
    codes = codes.clamp(min=1)  # compressed-tensors writes 0.125, which flushes the block to zero
    return torch.where(amax_grid == 0, encode(_constant(_epsilon(E4M3), amax_grid), E4M3), codes)


def e8m0_scales(amax_grid: Tensor, element: ElementFormat, rule: ScaleRule) -> Tensor:
    """Return power-of-two scales by exponent arithmetic on the bits of float32, as E8M0 codes.

    With field(x) the exponent field of a float32, FLOOR is ``field(amax) - emax``. EVEN adds half of the element's last
    mantissa bit to the bits of amax first. RCEIL is ``field(r)``, plus one when the mantissa of r is not zero, with
    ``r = amax / element.max`` rounded to float32.

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
    # CUDA divides by a Python number by its reciprocal; a copy from the host could not be captured in a graph
    return torch.full((), value, dtype=torch.float32, device=like.device)


#: Exponents that the search tries, relative to FLOOR. In a tie the earlier one wins. Others cannot win: +2 improves no
#: element, and with -2 the error of amax (for E2M1 6.25) grows by more than those of 31 others shrink (1.94).
SEARCH_OFFSETS = (0, 1, -1)

#: E4M3 codes that the search of NVFP4 tries, relative to that of ``amax / E2M1.max``. In a tie the earlier one wins.
#: Eight codes are a power of two, so 8 and more cannot win; -3 and less, and 7, would in one block of 5,000 to 15,000.
NVFP4_SEARCH_OFFSETS = (0, 1, -1, 2, -2, 3, 4, 5, 6)

#: The same where errors of columns count differently: a large element that counts little may saturate.
NVFP4_IMPORTANCE_OFFSETS = (0, *(sign * n for n in range(1, 8) for sign in (1, -1)))


def search_e8m0_scales(w: Tensor, granularity: Granularity, element: ElementFormat) -> Tensor:
    """Return the power-of-two scale with the smallest squared error, for every block of one row.

    With f the FLOOR code, k an offset, ``y = w * 2**-(f - 127)`` and ``q = decode(encode(y * 2**-k))``, the error of
    an element is ``d * d`` with ``d = y - q * 2**k``, rounded before it is added. Sums are a fixed tree that adds the
    upper half of a block to its lower half. A later k wins only if its sum is smaller; codes below 0 are skipped.
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


def search_nvfp4_scales(
    w: Tensor, granularity: Granularity, divisor: Tensor, importance: Tensor | None = None
) -> Tensor:
    """Return the E4M3 block scale with the smallest squared error, for every block of one row.

    With ``x = w * divisor``, ``c`` the value of a code, ``y = x * (1 / c)`` and ``q = decode(encode(y))``, the error of
    a block is the sum (the same tree) of ``(y - q)**2`` times ``c * c``. A later code wins only if this is smaller.
    With the `importance` of columns, float32 ``[K]``, errors are multiplied by it before they are added.

    Source: Four Over Six (arXiv 2512.02010) proposes the choice between the scales of amax / 6 and amax / 4.
    """
    blocks = _search_blocks(w, granularity)
    columns = None if importance is None else _search_blocks(importance[None], granularity)[0]
    first = nvfp4_scales(blocks.abs().amax(dim=-1), divisor).to(torch.int32)
    x = blocks * divisor
    best_code = first
    best_error: Tensor | None = None
    for offset in NVFP4_SEARCH_OFFSETS if importance is None else NVFP4_IMPORTANCE_OFFSETS:
        code = (first + offset).clamp(1, E4M3.max_code)
        value = decode(code.to(torch.uint8), E4M3)
        error = _block_error(x * (1.0 / value)[..., None], 0, E2M1, columns) * (value * value)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_code = torch.where(better, code, best_code)
        best_error = torch.where(better, error, best_error)
    return best_code.to(torch.uint8)


def _search_blocks(w: Tensor, granularity: Granularity) -> Tensor:
    """Return `w` as float32 ``[N, groups, cols]``; raise ValueError for blocks that a search cannot sum as a tree."""
    cols = granularity.cols
    if granularity.rows != 1 or cols is None or cols & (cols - 1):
        raise ValueError(f"the search needs blocks of one row and a power of two of columns, got {granularity}")
    return blocks_of(w.to(torch.float32), granularity).squeeze(1)


def _block_error(y: Tensor, offset: int, element: ElementFormat, importance: Tensor | None = None) -> Tensor:
    """Return the squared error of blocks ``y [..., cols]`` with the scale ``2**offset``, summed by the fixed tree."""
    step = 2.0**offset
    d = y - decode(encode(y / step, element), element) * step
    error = d * d if importance is None else d * d * importance
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)
