"""`gram`: every instruction set against float64, its independence of threads, and the checks of its arguments."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel_cases import Guarded, Kernels, assert_close, inputs
from modes import each_pair

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native import STRUCTS
from minifloat.kernels.rounding import gram

#: Rows around pairs, steps (32), depths (128, 512) and slabs (1024, 2048).
ROWS = (1, 2, 31, 33, 129, 700, 1100, 2100)
#: Columns around the widths of panels (4 to 48) and blocks (128).
WIDTHS = ((1, 1), (5, 49), (31, 33), (48, 16), (129, 7), (64, 150))

dtypes = pytest.mark.parametrize("dtype", tuple(DTYPES), ids=str)


def run(kernels: Kernels, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Add to a copy of `out`, between guards that are checked; `y` may be `x`."""
    buffer = torch.full((out.numel() + 128,), 7.0)
    result = buffer[64 : 64 + out.numel()].view(out.shape).copy_(out)
    kernels.library.call(
        "gram",
        STRUCTS["gram_args"](
            x=x.data_ptr(),
            y=y.data_ptr(),
            out=result.data_ptr(),
            rows=x.shape[0],
            x_cols=x.shape[1],
            y_cols=y.shape[1],
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            dtype=DTYPES[x.dtype],
            symmetric=y is x,
            threads=threads,
        ),
    )
    assert (buffer[:64] == 7.0).all()
    assert (buffer[64 + out.numel() :] == 7.0).all()
    return result


def check(result: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compare with float64. Each addition may round by half a step: six standard deviations of such a random walk."""
    sums = 2 * len(x) ** 0.5 * torch.finfo(torch.float32).eps / 2
    assert_close(result, x.double().T @ y.double(), x.T, y.double().T, sums)


@pytest.mark.parametrize(("rows", "widths", "dtype"), each_pair(ROWS, WIDTHS, tuple(DTYPES)))
def test_ragged_shapes(kernels: Kernels, rows: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
    x, y = inputs(rows, widths[0], dtype), inputs(rows, widths[1], dtype, seed=1)
    check(run(kernels, x, y, torch.zeros(widths)), x, y)


@pytest.mark.parametrize(("rows", "cols", "dtype"), each_pair(ROWS, (1, 9, 47, 64, 131, 300), tuple(DTYPES)))
def test_with_itself_the_result_is_symmetric(kernels: Kernels, rows: int, cols: int, dtype: torch.dtype) -> None:
    x = inputs(rows, cols, dtype)
    result = run(kernels, x, x, torch.zeros(cols, cols))
    check(result, x, x)
    assert torch.equal(result, result.T)


@dtypes
def test_the_result_is_added_to(kernels: Kernels, dtype: torch.dtype) -> None:
    """Also where `out` is not symmetric."""
    x, y = inputs(70, 60, dtype), inputs(70, 60, dtype, seed=1)
    before = inputs(60, 60, torch.float32, seed=2)
    zeros = torch.zeros(60, 60)
    for other in (x, y):
        assert torch.equal(run(kernels, x, other, before), before + run(kernels, x, other, zeros))


@dtypes
@pytest.mark.parametrize("threads", [0, 2, 3, 8, 1000])
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, dtype: torch.dtype, threads: int) -> None:
    x, y = inputs(2500, 290, dtype), inputs(2500, 140, dtype, seed=1)
    for other in (x, y):
        zeros = torch.zeros(290, other.shape[1])
        assert torch.equal(run(kernels, x, other, zeros, threads), run(kernels, x, other, zeros))


@dtypes
def test_rows_may_lie_apart_at_odd_addresses_and_nothing_beside_them_is_read(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    wide = torch.full((40, 101), torch.nan, dtype=dtype)
    x = wide[:, 1:71]
    x.copy_(inputs(40, 70, dtype))
    check(run(kernels, x, x, torch.zeros(70, 70)), x, x)
    packed = x.contiguous()
    guard = Guarded(packed.nbytes)
    for place in (guard.at_the_end, guard.at_the_start):
        placed = place(packed)
        assert torch.equal(run(kernels, placed, placed, torch.zeros(70, 70)), run(kernels, x, x, torch.zeros(70, 70)))


def test_sums_of_bfloat16_are_not_rounded_to_bfloat16(kernels: Kernels) -> None:
    x = torch.ones(1000, 3, dtype=torch.bfloat16)
    assert (run(kernels, x, x, torch.zeros(3, 3)) == 1000.0).all()


def test_nan_and_inf_reach_their_row_and_column_alone(kernels: Kernels) -> None:
    for dtype in tuple(DTYPES):
        x = inputs(50, 40, dtype)
        x[3, 5] = torch.nan
        result = run(kernels, x, x, torch.zeros(40, 40))
        touched = torch.zeros(40, 40, dtype=torch.bool)
        touched[5] = touched[:, 5] = True
        assert torch.equal(result.isnan(), touched)


def test_dot_products_of_bfloat16_have_no_subnormal_numbers(kernels: Kernels) -> None:
    """The instruction sets with such products count inputs and sums below 2^-126 as zero; the others keep them."""
    flushes = kernels.library.isa in ("amx", "avx512_bf16")
    x = torch.zeros(4, 2, dtype=torch.bfloat16)
    x[0] = torch.tensor([2.0**-127, 2.0**-60])
    y = torch.zeros(4, 2, dtype=torch.bfloat16)
    y[0] = torch.tensor([2.0**100, 2.0**-70])
    exact = x.float().T @ y.float()
    expected = torch.tensor([[0.0, 0.0], [2.0**40, 0.0]]) if flushes else exact
    assert exact.count_nonzero() == 3  # of which one is a sum below 2^-126 and one has such an input
    assert torch.equal(run(kernels, x, y, torch.zeros(2, 2)), expected)


def test_sums_round_to_nearest_even_whatever_the_caller_rounds_to(kernels: Kernels) -> None:
    """A column of 1 and 2^-24, and one of 1, 2^-23 and 2^-24, in pairs of rows of their own: two ties."""
    upward, libm = 0x800, ctypes.CDLL(None)
    x = torch.zeros(6, 2, dtype=torch.bfloat16)
    x[0] = 1.0
    x[2] = torch.tensor([0.0, 2.0**-23])
    x[4] = 2.0**-24
    y = torch.ones(6, 1, dtype=torch.bfloat16)
    before = libm.fegetround()
    try:
        libm.fesetround(upward)
        result = run(kernels, x, y, torch.zeros(2, 1))
    finally:
        libm.fesetround(before)
    assert result.flatten().tolist() == [1.0, 1.0 + 2.0**-22]


@pytest.mark.parametrize(("field", "value"), [("rows", -1), ("dtype", 3), ("x_cols", -1), ("y", None)])
def test_the_library_refuses_what_would_leave_its_memory(kernels: Kernels, field: str, value: int | None) -> None:
    x = inputs(4, 4, torch.float32)
    out = torch.zeros(4, 4)
    args = STRUCTS["gram_args"](x=x.data_ptr(), y=x.data_ptr(), out=out.data_ptr(), rows=4, x_cols=4, y_cols=4)
    args.x_stride = args.y_stride = 4
    args.dtype, args.symmetric, args.threads = DTYPES[x.dtype], 1, 1
    setattr(args, field, value)
    with pytest.raises(ValueError, match="refused"):
        kernels.library.call("gram", args)


@dtypes
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_public_function_adds_the_product(dtype: torch.dtype, impl: str) -> None:
    x, y = inputs(90, 50, dtype), inputs(90, 20, dtype, seed=1)
    out = torch.zeros(50, 20)
    gram(x, y, out, impl=impl)
    check(out, x, y)
    square = torch.zeros(50, 50)
    gram(x, x[:], square, impl=impl)
    gram(x, x[:], square, impl=impl)
    check(square / 2, x, x)
    assert torch.equal(square, square.T)


def test_no_rows_and_no_columns_add_nothing() -> None:
    for impl in ("auto", "reference"):
        out = torch.ones(3, 2)
        gram(torch.empty(0, 3), torch.empty(0, 2), out, impl=impl)
        assert (out == 1.0).all()
        gram(torch.empty(5, 0), torch.empty(5, 2), torch.empty(0, 2), impl=impl)


def test_arguments_that_do_not_match_are_refused_by_name() -> None:
    x, out = torch.zeros(4, 8), torch.zeros(8, 8)
    with pytest.raises(ShapeError, match=r"y.*\[4, K2\]"):
        gram(x, torch.zeros(5, 8), out)
    with pytest.raises(ShapeError, match=r"out.*\[8, 8\]"):
        gram(x, x, torch.zeros(8, 9))
    with pytest.raises(ShapeError, match=r"x.*2 dimensions"):
        gram(x[0], x, out)
    with pytest.raises(UnsupportedTensorError, match=r"y.*float32.*bfloat16"):
        gram(x, x.bfloat16(), out)
    with pytest.raises(UnsupportedTensorError, match=r"x.*float64"):
        gram(x.double(), x.double(), out)
    with pytest.raises(UnsupportedTensorError, match="contiguous rows"):
        gram(torch.zeros(8, 4).T, x, out)
    with pytest.raises(UnsupportedTensorError, match=r"out.*contiguous"):
        gram(x, torch.zeros(4, 7), torch.zeros(7, 8).T)
    with pytest.raises(UnsupportedTensorError, match=r"out.*float32"):
        gram(x, x, out.double())
    with pytest.raises(UnknownNameError, match="valid: auto"):
        gram(x, x, out, impl="fast")


def test_without_the_library_auto_is_the_reference_and_cpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_unavailable", lambda: "not built")
    out = torch.zeros(2, 2)
    gram(torch.ones(3, 2), torch.ones(3, 2), out)
    assert (out == 3.0).all()
    with pytest.raises(KernelUnavailable, match="not built"):
        gram(torch.ones(3, 2), torch.ones(3, 2), out, impl="cpu")
