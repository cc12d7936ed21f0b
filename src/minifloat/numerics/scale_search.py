"""Plain-torch reference of the search for scales: the code near that of amax with the smallest squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import Granularity
from minifloat.numerics.scale_rules import blocks_of, e8m0_scales, nvfp4_scales
from minifloat.numerics.scheme import ScaleRule

#: Exponents that the search tries, relative to FLOOR. In a tie the earlier one wins. Others cannot win: +2 improves no
#: element, and with -2 the error of amax (for E2M1 6.25) grows by more than those of 31 others shrink (1.94).
SEARCH_OFFSETS = (0, 1, -1)

#: E4M3 codes that the search of NVFP4 tries, relative to that of ``amax / E2M1.max``. In a tie the earlier one wins.
#: Eight codes are a power of two, so 8 and more cannot win; -3 and less, and 7, would in one block of 5,000 to 15,000.
NVFP4_SEARCH_OFFSETS = (0, 1, -1, 2, -2, 3, 4, 5, 6)


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


def search_nvfp4_scales(w: Tensor, granularity: Granularity, divisor: Tensor) -> Tensor:
    """Return the E4M3 block scale with the smallest squared error, for every block of one row.

    With ``x = w * divisor``, ``c`` the value of a code, ``y = x * (1 / c)`` and ``q = decode(encode(y))``, the error of
    a block is the sum (the same tree) of ``(y - q)**2`` times ``c * c``. A later code wins only if this is smaller.

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
