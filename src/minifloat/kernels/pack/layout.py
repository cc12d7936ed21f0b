"""The layout of packed weights in Python: the form of a `WeightSpec`, and the header."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, E8M0, FLOAT16, FLOAT32, ElementFormat
from minifloat.numerics.granularity import GROUP_16, GROUP_32
from minifloat.numerics.scheme import WeightSpec

TILE_ROWS = 16
PANEL_ROWS = 2 * TILE_ROWS
HALF_COLS = 2 * TILE_ROWS
STEP_COLS = 2 * HALF_COLS
VECTOR_BYTES = 4 * TILE_ROWS  #: also the alignment of a packed weight
STEPS_ALIGNMENT = 4096
MAX_DISTANCE = 125  #: powers of two below the largest scale of a row at which a block is stored as zeros

ROW, BLOCK, CODED_E8M0, CODED_E4M3 = range(4)  #: ``enum minifloat_grid``
_ELEMENTS = {E4M3: 0, E2M1: 1, BFLOAT16: 2, FLOAT16: 3, FLOAT32: 4}  # enum minifloat_element


@dataclass(frozen=True)
class Form:
    """The form in which the CPU kernels hold a weight ``[N, K]``."""

    format: ElementFormat
    grid: int
    shape: tuple[int, int]
    block: tuple[int, int]

    @property
    def element(self) -> int:
        return _ELEMENTS[self.format]


def form_of(spec: WeightSpec | None, shape: tuple[int, int], plain: ElementFormat = BFLOAT16) -> Form | str:
    """Return the form of a weight, or what has none; without a `spec` its elements are those of `plain`."""
    rows, cols = shape
    if rows < 1 or cols < 1:
        return f"an empty weight {rows}x{cols}"
    if spec is None:
        return Form(plain, ROW, shape, (1, cols))
    if spec.element not in (E4M3, E2M1):
        return f"{spec.element.name} elements; there are kernels for E4M3 and E2M1"
    if spec.element is E2M1 and cols % 2:
        return f"an odd number of columns, {cols}, with two elements to a byte"
    block = spec.granularity.block(shape)
    if spec.scale is E8M0 and spec.granularity == GROUP_32:
        return Form(spec.element, CODED_E8M0, shape, block)
    if spec.scale is E4M3 and spec.granularity == GROUP_16 and spec.element is E2M1:
        return Form(spec.element, CODED_E4M3, shape, block)
    if spec.scale not in (FLOAT32, E8M0):
        return f"{spec.element.name} with {spec.scale.name} scales per {spec.granularity}"
    if block[1] >= cols:
        return Form(spec.element, ROW, shape, block)
    if spec.element is not E4M3 or block[1] % HALF_COLS:
        return f"{spec.element.name} with {spec.scale.name} scales per {spec.granularity}"
    return Form(spec.element, BLOCK, shape, block)


@dataclass(frozen=True)
class Header:
    """``struct Header`` at the start of a packed weight. Offsets and sizes are in bytes."""

    element: int
    grid: int
    rows: int
    cols: int
    block_cols: int
    block_lanes: int
    row_scales: int
    block_scales: int
    steps: int
    total: int

    FORMAT = struct.Struct("=IIiiqqqiiqqqq")
    MAGIC = 0x4B504D46
    VERSION = 2

    @classmethod
    def read(cls, data: bytes) -> Header | str:
        """Return the header at the start of `data`, or why it is not valid."""
        if len(data) < cls.FORMAT.size:
            return f"{len(data)} bytes are fewer than a header"
        magic, version, element, grid, rows, cols, block_cols, lanes, _, *offsets = cls.FORMAT.unpack_from(data)
        if magic != cls.MAGIC:
            return "the bytes are not those of a packed weight"
        if version != cls.VERSION:
            return f"packed in layout version {version}, this is {cls.VERSION}; pack the weight again"
        return cls(element, grid, rows, cols, block_cols, lanes, *offsets)

    def write(self) -> bytes:
        return self.FORMAT.pack(
            self.MAGIC, self.VERSION, self.element, self.grid, self.rows, self.cols, self.block_cols,
            self.block_lanes, 0, self.row_scales, self.block_scales, self.steps, self.total,
        )  # fmt: skip


def plan(form: Form) -> Header:
    rows, cols = form.shape
    panels, steps = -(-rows // PANEL_ROWS), -(-cols // STEP_COLS)
    block_rows, block_cols = form.block
    lanes, groups = 0, 1
    if form.grid == BLOCK:
        lanes = 1 if block_rows % PANEL_ROWS == 0 or block_rows >= rows else PANEL_ROWS
        groups = -(-cols // block_cols)
    row_scales = _round_up(Header.FORMAT.size, VECTOR_BYTES)
    block_scales = row_scales + panels * PANEL_ROWS * FLOAT32.bits // 8
    normal = block_scales + panels * groups * lanes * FLOAT32.bits // 8
    first = _round_up(normal + (panels * steps * 2 if form.format is E4M3 else 0), STEPS_ALIGNMENT)
    total = first + panels * steps * step_bytes(form)
    scale_cols = block_cols if form.grid == BLOCK else cols
    return Header(form.element, form.grid, rows, cols, scale_cols, lanes, row_scales, block_scales, first, total)


def inline_scale_bytes(form: Form) -> int:
    """Return the bytes of scales at the start of a step."""
    if form.grid in (CODED_E8M0, CODED_E4M3):
        return PANEL_ROWS * STEP_COLS // form.block[1]
    return 0


def step_bytes(form: Form) -> int:
    return inline_scale_bytes(form) + PANEL_ROWS * STEP_COLS * form.format.bits // 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
