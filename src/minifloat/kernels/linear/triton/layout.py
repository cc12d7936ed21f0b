"""The layout of a weight in a GPU's memory, the weights that it covers, and packing in plain PyTorch."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from minifloat.kernels.pack.layout import BLOCK, CODED_E8M0, MAX_DISTANCE, ROW
from minifloat.kernels.pack.layout import form_of as cpu_form_of
from minifloat.kernels.pack.reference import e8m0_codes
from minifloat.numerics.cast import decode
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import GROUP_16, GROUP_32
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
        return cls.NARROW if capability[0] in (9, 10) else cls.WIDE


def form_of(spec: WeightSpec, shape: tuple[int, int]) -> GpuForm | str:
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


# Two or four elements share a unit of 16 bits, arranged so that few instructions turn two units into pairs of bfloat16:
# an element in the low exponent and first mantissa bits is itself times a power of two, subnormals included.

#: Exponent field of the largest multiplier, 2**126, which turns the bits of E2M1 into its value.
TOP = BFLOAT16.bias + 126
#: After the multiplication, elements are too large by 2**SHIFTS; the factor of the row corrects it.
SHIFTS = {GpuForm.MXFP8: 6, GpuForm.MXFP4: 0, GpuForm.NVFP4: -8}
#: Added to the exponent field of a coded E4M3 scale: the bits of its bfloat16 are ``(code << 4) + (LOWEST << 7)``.
LOWEST = 235
#: Columns that share a coded scale.
GROUP_COLS = {form: GROUP_32.block((1, 1))[1] for form in (GpuForm.MXFP8, GpuForm.MXFP4)}
GROUP_COLS[GpuForm.NVFP4] = GROUP_16.block((1, 1))[1]
_MANTISSA = (1 << E4M3.mantissa_bits) - 1


def _columns(form: GpuForm, order: Order) -> tuple[tuple[int, ...], str]:
    """Return lengths and names of the axes of 128 columns, outermost first."""
    inner = ((4, 2, 2), "tje") if order is Order.WIDE else ((2, 4, 2), "jte")
    if form in (GpuForm.MXFP4, GpuForm.NVFP4):
        return (2, 2, 2, *inner[0]), "qbs" + inner[1]
    return (4, 2, *inner[0]), "bs" + inner[1]


def _memory(form: GpuForm) -> str:
    """Return the axes in the order of memory: p panels, c tiles, r halves."""
    return "pcrqwgtbhejs" if form in (GpuForm.MXFP4, GpuForm.NVFP4) else "pcrbwgtshej"


def padded(matrix: Tensor, cols: int) -> Tensor:
    """Pad a matrix with zeros to whole panels of rows and a multiple of `cols` columns."""
    rows, width = matrix.shape
    return torch.nn.functional.pad(matrix, (0, -width % cols, 0, -rows % PANEL_ROWS))


def pack_elements(elements: Tensor, form: GpuForm, order: Order) -> Tensor:
    """Pack codes into words."""
    whole = padded(elements, TILE_COLS)
    cols, names = _columns(form, order)
    axes = "prwhgc" + names
    split = whole.view(-1, 2, 4, 2, 8, whole.shape[1] // TILE_COLS, *cols)
    fragments = split.permute(*(axes.index(name) for name in _memory(form))).to(torch.int16)
    if form in (GpuForm.MXFP4, GpuForm.NVFP4):
        return _join_nibbles(fragments).flatten()
    return _join_bytes(fragments).flatten()


def unpack_elements(pairs: Tensor, shape: tuple[int, int], form: GpuForm, order: Order) -> Tensor:
    panels, tiles = -(-shape[0] // PANEL_ROWS), -(-shape[1] // TILE_COLS)
    cols, names = _columns(form, order)
    lengths = dict(zip("prwhgc" + names, (panels, 2, 4, 2, 8, tiles, *cols), strict=True))
    memory = _memory(form)
    nibbles = form in (GpuForm.MXFP4, GpuForm.NVFP4)
    within = "js" if nibbles else "j"
    view = pairs.view([lengths[name] for name in memory if name not in within])
    fragments = _split_nibbles(view) if nibbles else _split_bytes(view)
    whole = fragments.permute(*(memory.index(name) for name in "prwhgc" + names))
    matrix = whole.reshape(panels * PANEL_ROWS, tiles * TILE_COLS)
    return matrix[: shape[0], : shape[1]].to(torch.uint8).contiguous()


def _join_bytes(codes: Tensor) -> Tensor:
    """Join int16 ``[..., e, j]`` into ``[..., e]``: the first as the bits of a bfloat16, the second in the rest."""
    first, second = codes.unbind(-1)
    sign = (second >> 7) & 1
    return (
        (first & 0x80) << 8 | (first & 0x7F) << 4
        | (second & 0x78) << 8 | second & 0x07
        | sign.flip(-1) << 3
    )  # fmt: skip


def _split_bytes(units: Tensor) -> Tensor:
    first = (units >> 8) & 0x80 | (units >> 4) & 0x7F
    second = (units >> 8) & 0x78 | units & 0x07 | ((units >> 3) & 1).flip(-1) << 7
    return torch.stack((first, second), dim=-1)


def _join_nibbles(codes: Tensor) -> Tensor:
    """Join int16 ``[..., e, j, s]`` into ``[..., e]``; the sign of the third is in the other half of the word."""
    (a, c), (b, d) = (part.unbind(-1) for part in codes.unbind(-2))
    return (
        (a & 8) << 6 | a & 7
        | (b & 8) << 10 | (b & 7) << 4
        | (c & 7) << 10 | ((c >> 3) & 1).flip(-1) << 3
        | (d & 8) << 12 | (d & 6) << 6 | (d & 1) << 14
    )  # fmt: skip


def _split_nibbles(units: Tensor) -> Tensor:
    a = (units >> 6) & 8 | units & 7
    b = (units >> 10) & 8 | (units >> 4) & 7
    c = (units >> 10) & 7 | ((units >> 3) & 1).flip(-1) << 3
    d = (units >> 12) & 8 | (units >> 6) & 6 | (units >> 14) & 1
    return torch.stack((torch.stack((a, c), dim=-1), torch.stack((b, d), dim=-1)), dim=-2)


def pack_factors(codes: Tensor, form: GpuForm) -> Tensor:
    """Pack bytes of coded scales ``[N, groups]`` in the order of fragments: int32, flat."""
    groups = TILE_COLS // GROUP_COLS[form]
    whole = padded(codes, groups)
    tiles = whole.shape[1] // groups
    split = whole.view(-1, 2, 4, 2, 8, tiles, groups // 4, 4)  # p r w h g c q byte
    return split.permute(0, 5, 1, 6, 2, 4, 3, 7).contiguous().flatten().view(torch.int32)


def unpack_factors(words: Tensor, shape: tuple[int, int], groups: int) -> Tensor:
    panels, tiles = -(-shape[0] // PANEL_ROWS), -(-shape[1] // TILE_COLS)
    view = words.view(torch.uint8).view(panels, tiles, 2, -1, 4, 8, 2, 4)
    return view.permute(0, 2, 4, 6, 5, 1, 3, 7).reshape(panels * PANEL_ROWS, -1)[: shape[0], :groups].contiguous()


def code_powers(elements: Tensor, scales: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Code E8M0 scales as exponent fields of multipliers, relative to the largest scale of each row."""
    width = GROUP_COLS[GpuForm.MXFP4]
    magnitude = (elements & ((1 << (element.bits - 1)) - 1)).to(torch.uint8)
    blocks = torch.nn.functional.pad(magnitude, (0, -elements.shape[1] % width)).view(elements.shape[0], -1, width)
    nothing = torch.eq(scales, E8M0.nan_code or 0) | (blocks == 0).all(dim=2)
    largest = scales.masked_fill(nothing, 0).amax(dim=1)
    distance = largest[:, None].int() - scales.int()
    fields = (TOP - distance).clamp(max=TOP).masked_fill(distance > MAX_DISTANCE, 0)
    return fields.to(torch.uint8), largest


def powers(fields: Tensor, largest: Tensor) -> Tensor:
    return (largest[:, None].int() - TOP + fields.int()).to(torch.uint8)


def code_scales(scales: Tensor) -> Tensor:
    """Code positive finite E4M3 scales as 5 bits of exponent and 3 of mantissa: uint8."""
    values = decode(scales & 0x7F, E4M3).nan_to_num(0.0)
    mantissa, exponent = torch.frexp(values)
    field = exponent - 1 + 118 + BFLOAT16.bias - LOWEST
    fraction = (mantissa * (2 << E4M3.mantissa_bits)).to(torch.int32) & _MANTISSA
    return torch.where(values == 0, 0, field << E4M3.mantissa_bits | fraction).to(torch.uint8)


def scales_of(codes: Tensor) -> Tensor:
    table = torch.zeros(1 << 8, dtype=torch.uint8)
    scales = torch.arange(1, E4M3.max_code + 1, dtype=torch.uint8)
    table[code_scales(scales).long()] = scales
    return table.to(codes.device)[codes.long()]


def largest_codes(row_scale: Tensor, form: GpuForm) -> Tensor:
    """Return the largest E8M0 scale of each row, from the factor of its sum."""
    return e8m0_codes((row_scale.double() * 2.0 ** SHIFTS[form]).float())
