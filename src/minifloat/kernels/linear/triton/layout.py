"""The layout of a weight in a GPU's memory, and the weights that it covers."""

from __future__ import annotations

import enum

from minifloat.kernels.pack.layout import BLOCK, CODED_E8M0, ROW
from minifloat.kernels.pack.layout import form_of as cpu_form_of
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.scheme import WeightSpec

# A tensor core multiplies fragments: lane ``4 * g + t`` of warp w holds rows ``16 * w + 8 * h + g`` and columns ``8 * j
# + 2 * t + e`` of a tile of 64 rows and 16 columns. Weights are stored in this order, so that each lane reads its own
# 16 bytes and decodes them into its operand. Memory runs over panels of 128 rows, tiles of 128 columns, halves, then
#
#     E4M3:  block of 32 columns, w, g, t, s (16 columns each), h, e     16 bits each: the elements of both j
#     E2M1:  half of 64 columns, w, g, t, block of 32, h, e              16 bits each: the elements of both j and both s
#
# ``mma.sync`` takes columns ``4 * t + 2 * j + e`` instead: `Order.WIDE`.

HALF_ROWS = 64  #: rows of a fragment of four warps
PANEL_ROWS = 2 * HALF_ROWS
TILE_COLS = 128


class GpuForm(enum.IntEnum):
    """The formats of weights that the GPU kernels multiply, by element and scales."""

    FP8 = 0  #: E4M3; one factor per row, after the sum
    FP8_BLOCK = 1  #: E4M3; a float32 factor per block, after the sum over each tile of columns
    MXFP8 = 2  #: E4M3; a power of two per 32 columns, with the element
    MXFP4 = 3  #: E2M1; a power of two per 32 columns, with the element
    NVFP4 = 4  #: E2M1; an E4M3 factor per 16 columns, with the element


class Order(enum.IntEnum):
    """The columns of a tile that a lane holds."""

    NARROW = 0  #: wgmma (9.x), tcgen05 (10.x)
    WIDE = 1  #: mma.sync

    @classmethod
    def of(cls, capability: tuple[int, int]) -> Order:
        """Return the order for a compute capability."""
        return cls.NARROW if capability[0] in (9, 10) else cls.WIDE


def form_of(spec: WeightSpec, shape: tuple[int, int]) -> GpuForm | str:
    """Return the form of a weight, or why it has none."""
    form = cpu_form_of(spec, shape)
    if isinstance(form, str):
        return form
    if form.grid == ROW and form.format is E4M3:
        return GpuForm.FP8
    if form.grid == BLOCK and form.block[1] % TILE_COLS == 0:
        return GpuForm.FP8_BLOCK
    if form.grid == CODED_E8M0:
        return GpuForm.MXFP8 if form.format is E4M3 else GpuForm.MXFP4
    if form.grid not in (ROW, BLOCK):
        return GpuForm.NVFP4
    return f"{spec.element.name} with {spec.scale.name} scales per {spec.granularity}"


def units_per_tile(form: GpuForm) -> int:
    """Return the number of 16-bit units of elements in a tile of half a panel."""
    element = E2M1 if form in (GpuForm.MXFP4, GpuForm.NVFP4) else E4M3
    return HALF_ROWS * TILE_COLS * element.bits // 16


def words_per_tile(form: GpuForm) -> int:
    """Return the number of 32-bit words of coded scales in a tile of half a panel; 0 if there are none."""
    if form in (GpuForm.MXFP8, GpuForm.MXFP4):
        return HALF_ROWS
    return 2 * HALF_ROWS if form is GpuForm.NVFP4 else 0
