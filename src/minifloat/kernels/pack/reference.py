"""Packing in plain PyTorch, as permutations of dimensions: the reference of the native packer, byte for byte."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels.pack.layout import (
    BLOCK,
    CODED_E4M3,
    CODED_E8M0,
    HALF_COLS,
    MAX_DISTANCE,
    PANEL_ROWS,
    ROW,
    STEP_COLS,
    TILE_ROWS,
    VECTOR_BYTES,
    Form,
    Header,
    inline_scale_bytes,
    plan,
)
from minifloat.numerics.cast import decode, pack_nibbles, unpack_nibbles
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, E8M0, FLOAT16, FLOAT32

_MAGNITUDE = E4M3.nan_code or 0  #: all bits of a code but its sign
_EXPONENT = _MAGNITUDE >> E4M3.mantissa_bits << E4M3.mantissa_bits


def pack(codes: Tensor, scales: Tensor | None, factor: float, form: Form, packed: Tensor) -> None:
    """Fill `packed`, uint8 ``[plan(form).total]``."""
    header = plan(form)
    packed.zero_()
    packed[: Header.FORMAT.size] = torch.frombuffer(bytearray(header.write()), dtype=torch.uint8)
    elements = unpack_nibbles(codes) if form.format is E2M1 else codes
    inline = None
    row_scales = torch.ones(form.shape[0])
    if scales is not None and form.grid == ROW:
        row_scales = _rows(scales.float() * factor, form)[:, 0].clone()
    elif scales is not None and form.grid == BLOCK:
        _floats(packed, header.block_scales, header.steps, _block_scales(scales * factor, form, header))
    elif scales is not None and form.grid == CODED_E8M0:
        inline, largest, flushed = _distances(elements, scales, form)
        row_scales = decode(largest, E8M0)
        elements = elements.masked_fill(_columns(flushed, form), 0)
    elif scales is not None and form.grid == CODED_E4M3:
        inline = scales.masked_fill((scales & _MAGNITUDE) == _MAGNITUDE, 0)
        row_scales.fill_(factor)
    row_scales[_nan_rows(codes, scales, form)] = torch.nan
    _floats(packed, header.row_scales, header.block_scales, row_scales)
    if form.format is E4M3:
        elements = elements.masked_fill((elements & _MAGNITUDE) == _MAGNITUDE, 0)
    data = _steps(elements, inline, form)
    packed[header.steps :] = data.flatten()
    if form.format is E4M3:
        normal = _normal(data[:, :, inline_scale_bytes(form) :])
        packed[header.steps - 2 * normal.numel() : header.steps].view(torch.int16).copy_(normal.flatten())


def unpack(codes: Tensor, scales: Tensor | None, form: Form, packed: Tensor) -> None:
    header = plan(form)
    rows = form.shape[0]
    row_scales = packed[header.row_scales : header.block_scales].view(torch.float32)[:rows]
    elements, inline = _from_steps(packed[header.steps :], form)
    nan = row_scales.isnan()
    if form.format is E4M3:
        elements[nan] = _MAGNITUDE
    codes.copy_(pack_nibbles(elements) if form.format is E2M1 else elements.view(codes.dtype))
    if scales is None:
        return
    if form.grid == ROW:
        finite = row_scales.nan_to_num(-torch.inf)
        grid = torch.nn.functional.pad(finite, (0, -rows % form.block[0]), value=-torch.inf)
        shared = grid.view(-1, form.block[0]).amax(dim=1, keepdim=True)
        scales.copy_(torch.where(shared.isinf(), 1.0, shared))
    elif form.grid == BLOCK:
        scales.copy_(_unpacked_block_scales(packed[header.block_scales :], form, header))
    elif inline is not None:
        nan_code = E8M0.nan_code if form.grid == CODED_E8M0 else E4M3.nan_code
        if form.grid == CODED_E8M0:
            inline = e8m0_codes(row_scales)[:, None] - inline
        scales.copy_(inline.masked_fill(nan[:, None], nan_code or 0))


def e8m0_codes(scales: Tensor) -> Tensor:
    """Return the E8M0 codes of float32 powers of two from 2**-127 to 2**127; code 255 for NaN."""
    return (scales.view(torch.int32) >> FLOAT32.mantissa_bits).to(torch.uint8)


def _rows(grid: Tensor, form: Form) -> Tensor:
    """Repeat a scale grid ``[ceil(N / block rows), G]`` to ``[N, G]``."""
    return grid.repeat_interleave(form.block[0], dim=0)[: form.shape[0]]


def _columns(grid: Tensor, form: Form) -> Tensor:
    """Repeat ``[N, ceil(K / block cols)]`` to ``[N, K]``."""
    return grid.repeat_interleave(form.block[1], dim=1)[:, : form.shape[1]]


def _floats(packed: Tensor, begin: int, end: int, values: Tensor) -> None:
    packed[begin:end].view(torch.float32)[: values.numel()] = values.flatten()


def _padded(values: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    rows, cols = values.shape[:2]
    return torch.nn.functional.pad(values, (0, -cols % col_multiple, 0, -rows % row_multiple))


def _nan_rows(codes: Tensor, scales: Tensor | None, form: Form) -> Tensor:
    """Return whether each row holds a NaN element or a NaN coded scale, bool ``[N]``."""
    nan = torch.zeros(form.shape[0], dtype=torch.bool)
    if form.format is E4M3:
        nan |= ((codes & _MAGNITUDE) == _MAGNITUDE).any(dim=1)
    if scales is not None and form.grid == CODED_E8M0:
        nan |= torch.eq(scales, E8M0.nan_code or 0).any(dim=1)
    if scales is not None and form.grid == CODED_E4M3:
        nan |= ((scales & _MAGNITUDE) == _MAGNITUDE).any(dim=1)
    return nan


def _distances(elements: Tensor, scales: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distances ``[N, G]`` of E8M0 scales, the largest of each row ``[N]``, and a mask of flushed blocks."""
    magnitude = _MAGNITUDE if form.format is E4M3 else E2M1.max_code
    blocks = _padded(elements & magnitude, 1, form.block[1]).view(elements.shape[0], -1, form.block[1])
    nan = scales == E8M0.nan_code
    candidates = scales.masked_fill(nan | (blocks == 0).all(dim=2), 0)
    largest = candidates.amax(dim=1)
    distance = largest[:, None].int() - scales.int()
    flushed = distance > MAX_DISTANCE
    return distance.masked_fill(flushed | nan | (distance < 0), 0).to(torch.uint8), largest, flushed


def _block_scales(scales: Tensor, form: Form, header: Header) -> Tensor:
    """Return block scales as they are stored, float32 ``[panels, groups, lanes]``."""
    of_rows = _padded(_rows(scales, form), PANEL_ROWS, 1).view(-1, PANEL_ROWS, scales.shape[1])
    return of_rows[:, : header.block_lanes].transpose(1, 2)


def _unpacked_block_scales(data: Tensor, form: Form, header: Header) -> Tensor:
    panels, groups = -(-form.shape[0] // PANEL_ROWS), -(-form.shape[1] // form.block[1])
    count = panels * groups * header.block_lanes
    values = data[: count * torch.float32.itemsize].view(torch.float32).view(panels, groups, header.block_lanes)
    of_rows = values.transpose(1, 2).expand(-1, PANEL_ROWS, -1).flatten(0, 1)
    return of_rows[: form.shape[0] : form.block[0]]


#: How the rows and columns of half a tile, ``[16, 32]``, are split into axes, and the order of these axes in memory.
#: Then two 4-bit elements share a byte.
_SPLITS = {
    E4M3: ((4, 4), (8, 2, 2), (2, 0, 3, 1, 4)),
    E2M1: ((16,), (4, 4, 2), (1, 0, 3, 2)),
    BFLOAT16: ((16,), (16, 2), (1, 0, 2)),
    FLOAT16: ((16,), (16, 2), (1, 0, 2)),
    FLOAT32: ((16,), (32,), (1, 0)),
}
#: Elements that are not quantized, as integers that are padded with zeros.
_BITS = {BFLOAT16: torch.int16, FLOAT16: torch.int16, FLOAT32: torch.int32}


def _steps(elements: Tensor, inline: Tensor | None, form: Form) -> Tensor:
    """Return the steps of a packed weight, uint8 ``[panels, steps, bytes of a step]``."""
    tiles = _padded(elements.view(_BITS.get(form.format, torch.uint8)), PANEL_ROWS, STEP_COLS)
    tiles = tiles.view(-1, 2, TILE_ROWS, tiles.shape[1] // STEP_COLS, 2, HALF_COLS).permute(0, 3, 4, 1, 2, 5)
    rows, cols, order = _SPLITS[form.format]
    split = tiles.reshape(*tiles.shape[:4], *rows, *cols)
    ordered = split.permute(0, 1, 2, 3, *(4 + axis for axis in order)).flatten(2).contiguous()
    if form.format is E2M1:
        ordered = pack_nibbles(ordered)
    data = ordered.view(torch.uint8)
    if inline is None:
        return data
    groups = STEP_COLS // form.block[1]
    heads = _padded(inline, PANEL_ROWS, groups)
    heads = heads.view(-1, PANEL_ROWS, heads.shape[1] // groups, groups).permute(0, 2, 3, 1).flatten(2)
    return torch.cat((heads, data), dim=2)


def _normal(data: Tensor) -> Tensor:
    """Return ``[panels, steps]``: a bit for each vector of E4M3, set if it has neither zeros nor subnormal numbers."""
    small = (data & _EXPONENT).eq(0).view(*data.shape[:2], 2, 2, HALF_COLS // 4, VECTOR_BYTES)
    normal = small.any(5).any(3).logical_not().flatten(2)
    return (normal.int() << torch.arange(normal.shape[2])).sum(2)


def _from_steps(data: Tensor, form: Form) -> tuple[Tensor, Tensor | None]:
    panels, steps = -(-form.shape[0] // PANEL_ROWS), -(-form.shape[1] // STEP_COLS)
    by_step, head = data.view(panels, steps, -1), inline_scale_bytes(form)
    body = by_step[:, :, head:]
    if form.format is E2M1:
        body = unpack_nibbles(body)
    body = body.contiguous().view(_BITS.get(form.format, torch.uint8))
    rows, cols, order = _SPLITS[form.format]
    lengths = (*rows, *cols)
    split = body.view(panels, steps, 2, 2, *(lengths[axis] for axis in order))
    back = [order.index(axis) for axis in range(len(order))]
    tiles = split.permute(0, 1, 2, 3, *(4 + axis for axis in back)).reshape(panels, steps, 2, 2, TILE_ROWS, HALF_COLS)
    elements = tiles.permute(0, 3, 4, 1, 2, 5).reshape(panels * PANEL_ROWS, steps * STEP_COLS)
    elements = elements[: form.shape[0], : form.shape[1]]
    if head == 0:
        return elements, None
    groups = STEP_COLS // form.block[1]
    heads = by_step[:, :, :head].reshape(panels, steps, groups, PANEL_ROWS).permute(0, 3, 1, 2)
    heads = heads.reshape(panels * PANEL_ROWS, steps * groups)
    return elements, heads[: form.shape[0], : -(-form.shape[1] // form.block[1])]
