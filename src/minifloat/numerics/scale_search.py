"""Plain-torch reference of the search for scales: the code near that of amax with the smallest squared error.

Every fast kernel must equal it bit for bit. Operations and their order are stated, as in `numerics.scale_rules`, which
gives the code that each search starts from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import Granularity
from minifloat.numerics.scale_rules import blocks_of, e8m0_scales, nvfp4_scales
from minifloat.numerics.scheme import ScaleRule

#: Exponents that the search tries, relative to FLOOR. In a tie the earlier exponent wins.
SEARCH_OFFSETS = (0, 1, -1)

#: E4M3 codes that the search of NVFP4 tries, relative to that of ``amax / E2M1.max``. In a tie the earlier one wins.
NVFP4_SEARCH_OFFSETS = (0, 1, -1, 2, -2, 3, 4, 5, 6)


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
    smaller. The divisor is that of `global_divisor`, a power of two.

    The offsets reach from 0.77 to 1.75 times the scale of amax; 1.5 times is the second scale of Four Over Six, which
    maps amax to 4 instead of 6. Offsets of 8 and more cannot win among normal codes: eight codes are one power of two,
    and every multiple of E2M1 by twice a scale, up to the largest multiple by the scale itself, is also one by the
    scale. Offsets of -3 and less, and 7, are left out: one block in 5,000 to 15,000 (normal weights and two language
    models) would win by one of them, which would lower the squared error of all blocks together by 0.001%.

    Vector code can repeat the search bit for bit, as it can `search_e8m0_scales`: ``1 / c`` is one division, ``c * c``
    is exact, ``d * d`` is rounded before it is added, and the sum is the same fixed tree. The products x are at most
    ``E4M3.max * E2M1.max`` and a rounding, so that squares do not overflow.

    Args:
        w: ``[N, K]``, float32, bfloat16 or float16.
        granularity: Blocks of one row and a power of two of columns; a partial block is padded with zeros.
        divisor: float32 scalar of `global_divisor`.

    Returns:
        uint8 E4M3 codes on the scale grid, none of them of zero. A block of zeros gets 0.125, as from `nvfp4_scales`.

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


def _search_blocks(w: Tensor, granularity: Granularity) -> Tensor:
    """Return `w` as float32 ``[N, groups, cols]``; raise ValueError for blocks that a search cannot sum as a tree."""
    cols = granularity.cols
    if granularity.rows != 1 or cols is None or cols & (cols - 1):
        raise ValueError(f"the search needs blocks of one row and a power of two of columns, got {granularity}")
    return blocks_of(w.to(torch.float32), granularity).squeeze(1)


def _block_error(y: Tensor, offset: int, element: ElementFormat) -> Tensor:
    """Return the squared error of blocks ``y [..., cols]`` with the scale ``2**offset``, summed by the fixed tree."""
    step = 2.0**offset
    d = y - decode(encode(y / step, element), element) * step
    error = d * d
    while error.shape[-1] > 1:
        half = error.shape[-1] // 2
        error = error[..., :half] + error[..., half:]
    return error.squeeze(-1)
