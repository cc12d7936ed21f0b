"""Memory layout of x, y, weights and biases: any row stride, any alignment, no access beyond the ends."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_cases import DTYPES, KINDS, Guarded, Kernels, Packed, bits, inputs, make

M = (1, 2, 5, 16, 17, 33, 70)
#: Ragged: neither a multiple of the rows of a panel nor of the columns of a step; and exact multiples of both.
SHAPES = ((47, 100), (64, 128), (1, 2))

kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@kinds
@dtypes
def test_rows_of_x_may_have_a_stride_and_any_address(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    packed = kernels.pack(make(kind, 47, 100))
    for m in M:
        x = inputs(m, 100, dtype)
        expected = bits(kernels.linear(x, packed))
        for distance, offset in ((100, 1), (101, 0), (133, 3), (256, 17)):
            memory = torch.full((m * distance + offset,), torch.nan, dtype=dtype)
            strided = memory[offset:].view(m, distance)[:, :100].copy_(x)
            assert torch.equal(bits(kernels.linear(strided, packed)), expected)


@kinds
@dtypes
def test_x_may_be_at_an_odd_byte(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    packed = kernels.pack(make(kind, 47, 100))
    for m in M:
        x = inputs(m, 100, dtype)
        memory = torch.zeros(x.nbytes + 1, dtype=torch.uint8)
        memory[1:] = x.view(torch.uint8).flatten()
        y = torch.empty(m, 47, dtype=dtype)
        args = kernels.linear_args(x, [packed], None, y, 1)
        args.x = memory.data_ptr() + 1
        kernels.library.call("linear", args)
        assert torch.equal(bits(y), bits(kernels.linear(x, packed)))


@kinds
@dtypes
def test_rows_of_x_may_be_one_and_the_same(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    packed = kernels.pack(make(kind, 47, 100))
    for m in M:
        result = kernels.linear(inputs(1, 100, dtype).expand(m, -1), packed)
        assert torch.equal(bits(result), bits(result[:1].expand(m, -1)))


@kinds
@dtypes
def test_nothing_is_read_or_written_beyond_the_ends(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    for rows, cols in SHAPES:
        packed = kernels.pack(make(kind, rows, cols))
        memories = {name: Guarded(size) for name, size in sizes(packed, max(M), dtype).items()}
        bias = inputs(1, rows, dtype)[0]
        for m in M:
            x = inputs(m, cols, dtype)
            expected = bits(kernels.linear(x, packed, bias))
            for place in (Guarded.at_the_end, Guarded.at_the_start):
                y = place(memories["y"], torch.full((m, rows), torch.nan, dtype=dtype))
                blob = place(memories["blob"], packed.blob)
                kernels.linear(
                    place(memories["x"], x),
                    Packed(blob, packed.stored),
                    place(memories["bias"], bias),
                    y=y,
                )
                assert torch.equal(bits(y), expected)


def sizes(packed: Packed, m: int, dtype: torch.dtype) -> dict[str, int]:
    rows, cols = packed.stored.shape
    return {
        "x": m * cols * dtype.itemsize,
        "y": m * rows * dtype.itemsize,
        "bias": rows * dtype.itemsize,
        "blob": packed.blob.numel(),
    }


@kinds
@dtypes
def test_the_last_row_of_strided_x_and_y_ends_with_its_last_column(
    kernels: Kernels, kind: str, dtype: torch.dtype
) -> None:
    rows, cols, distance = 47, 100, 160
    packed = kernels.pack(make(kind, rows, cols))
    for m in M:
        x = inputs(m, cols, dtype)
        elements = (m - 1) * distance
        memory = Guarded((elements + cols) * dtype.itemsize).at_the_end(torch.empty(elements + cols, dtype=dtype))
        strided = memory.as_strided((m, cols), (distance, 1)).copy_(x)
        memory = Guarded((elements + rows) * dtype.itemsize).at_the_end(torch.empty(elements + rows, dtype=dtype))
        y = memory.as_strided((m, rows), (distance, 1))
        kernels.linear(strided, packed, y=y)
        assert torch.equal(bits(y), bits(kernels.linear(x, packed)))


@kinds
def test_zero_rows_access_no_memory(kernels: Kernels, kind: str) -> None:
    packed = kernels.pack(make(kind, 47, 100))
    args = kernels.linear_args(torch.empty(0, 100), [packed], None, torch.empty(0, 47), 1)
    args.x = args.y = None
    kernels.library.call("linear", args)


def test_memory_that_holds_no_packed_weight_is_refused(kernels: Kernels) -> None:
    x, y = torch.ones(1, 100), torch.zeros(1, 47)
    packed = kernels.pack(make("mxfp4", 47, 100))
    for offset, value in ((0, 0), (4, 99)):  # magic, version
        blob = packed.blob.clone()
        blob[offset] = value
        with pytest.raises(ValueError, match="status 3"):
            kernels.library.call("linear", kernels.linear_args(x, [Packed(blob, packed.stored)], None, y, 1))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), packed.blob])[1:]
    with pytest.raises(ValueError, match="status 3"):
        kernels.library.call("linear", kernels.linear_args(x, [Packed(shifted, packed.stored)], None, y, 1))
    assert (y == 0).all()


@pytest.mark.parametrize("other", [("mxfp4", 47, 98), ("mxfp8", 47, 100), ("nvfp4", 47, 100)])
def test_weights_of_one_call_are_of_one_format_and_width(kernels: Kernels, other: tuple[str, int, int]) -> None:
    x, y = torch.ones(1, 100), torch.zeros(1, 94)
    weights = [kernels.pack(make("mxfp4", 47, 100)), kernels.pack(make(*other))]
    with pytest.raises(ValueError, match="status 3"):
        kernels.library.call("linear", kernels.linear_args(x, weights, None, y, 1))
    assert (y == 0).all()


@pytest.mark.parametrize(
    ("field", "value"), [("count", 0), ("m", -1), ("x_dtype", 3), ("x_dtype", -1), ("weights", None)]
)
def test_fields_out_of_range_are_refused(kernels: Kernels, field: str, value: int | None) -> None:
    x, y = torch.ones(1, 100), torch.zeros(1, 47)
    packed = kernels.pack(make("mxfp4", 47, 100))
    args: ctypes.Structure = kernels.linear_args(x, [packed], None, y, 1)
    setattr(args, field, value)
    with pytest.raises(ValueError, match="status 2"):
        kernels.library.call("linear", args)
    assert (y == 0).all()
