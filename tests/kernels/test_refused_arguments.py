"""Tests that the C functions refuse what fuzzing found (`./scripts/fuzz`): sizes and formats out of range."""

from __future__ import annotations

import ctypes

import pytest

from minifloat.kernels import native
from minifloat.kernels.native import STRUCTS

E4M3 = (8, 3, -6, 448.0)


@pytest.fixture
def kernels() -> native.Library:
    library = native.load()
    if library is None:
        pytest.skip("no native library")
    return library


def rounding(element: tuple[int, int, int, float]) -> ctypes.Structure:
    """Arguments of no rows, which only the check of the format can refuse."""
    args = STRUCTS["round_inputs_args"]()
    args.rows, args.cols, args.x_stride, args.dtype, args.scaling, args.threads = 0, 16, 16, 0, 1, 1
    args.element = STRUCTS["format"](*element)
    return args


@pytest.mark.parametrize(
    "element",
    [
        (8, 3, -200, 448.0),
        (8, 3, 200, 448.0),
        (8, 3, -6, float("inf")),
        (8, 3, -6, float("nan")),
        (8, 3, -6, 1e38),
        (8, 3, 10, 448.0),
        (8, 3, -6, 0.0),
    ],
)
def test_a_format_whose_values_are_no_normal_numbers_is_refused(
    kernels: native.Library, element: tuple[int, int, int, float]
) -> None:
    kernels.call("round_inputs", rounding(E4M3))
    with pytest.raises(ValueError, match="status 2"):
        kernels.call("round_inputs", rounding(element))


def cast(**changes: float) -> ctypes.Structure:
    """Arguments of a cast of no rows with coded scales (NVFP4)."""
    args = STRUCTS["quantize_rows_args"]()
    args.rows, args.cols, args.block_rows, args.block_cols, args.dtype, args.scaling = 0, 16, 1, 16, 0, 1
    args.element, args.scale = STRUCTS["format"](4, 1, 0, 6.0), STRUCTS["format"](*E4M3)
    args.divisor, args.zero_scale, args.one_scale, args.tensor_amax = 2.0, 1.0, 1, 1.0
    for name, value in changes.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("value", [-1.0, float("nan"), -float("nan"), float("inf"), -0.0])
@pytest.mark.parametrize("name", ["divisor", "zero_scale", "tensor_amax"])
def test_a_cast_with_a_factor_that_is_no_magnitude_is_refused(kernels: native.Library, name: str, value: float) -> None:
    kernels.call("quantize_rows", cast())
    with pytest.raises(ValueError, match="status 2"):
        kernels.call("quantize_rows", cast(**{name: value}))


@pytest.mark.parametrize(("rows", "cols"), [(2**62, 32), (32, 2**62), (2**31, 2**31)])
def test_a_weight_of_impossible_sizes_has_no_packed_form(kernels: native.Library, rows: int, cols: int) -> None:
    args = STRUCTS["pack_args"]()
    args.rows, args.cols, args.block_rows, args.block_cols, args.element, args.grid = rows, cols, 1, 2**62, 0, 0
    assert kernels.packed_bytes(args) == 0
    args.rows = args.cols = 32
    assert kernels.packed_bytes(args) > 0
