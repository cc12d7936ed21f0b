"""Packs for the GPU in plain PyTorch: elements into the order of fragments, scales into factors, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels.linear.triton.layout import PANEL_ROWS, TILE_COLS, GpuForm, Order
from minifloat.kernels.pack.layout import MAX_DISTANCE
from minifloat.kernels.pack.reference import e8m0_codes
from minifloat.numerics.cast import decode
from minifloat.numerics.formats import BFLOAT16, E4M3, E8M0, ElementFormat
from minifloat.numerics.granularity import GROUP_16, GROUP_32

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
    """Invert `pack_elements`: uint8 ``[N, K]``."""
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
    """Invert `pack_factors`: uint8 ``[N, groups]``."""
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
    """Invert `code_powers`; exact for scales that were neither clamped nor flushed."""
    return (largest[:, None].int() - TOP + fields.int()).to(torch.uint8)


def code_scales(scales: Tensor) -> Tensor:
    """Code positive finite E4M3 scales as 5 bits of exponent and 3 of mantissa: uint8."""
    values = decode(scales & 0x7F, E4M3).nan_to_num(0.0)
    mantissa, exponent = torch.frexp(values)
    field = exponent - 1 + 118 + BFLOAT16.bias - LOWEST
    fraction = (mantissa * (2 << E4M3.mantissa_bits)).to(torch.int32) & _MANTISSA
    return torch.where(values == 0, 0, field << E4M3.mantissa_bits | fraction).to(torch.uint8)


def scales_of(codes: Tensor) -> Tensor:
    """Invert `code_scales`: uint8 E4M3."""
    table = torch.zeros(1 << 8, dtype=torch.uint8)
    scales = torch.arange(1, E4M3.max_code + 1, dtype=torch.uint8)
    table[code_scales(scales).long()] = scales
    return table.to(codes.device)[codes.long()]


def largest_codes(row_scale: Tensor, form: GpuForm) -> Tensor:
    """Return the largest E8M0 scale of each row, from the factor of its sum."""
    return e8m0_codes((row_scale.double() * 2.0 ** SHIFTS[form]).float())
