"""Tests that the C functions refuse what fuzzing found (`./scripts/fuzz`): sizes and formats out of range."""

from __future__ import annotations

import pytest

from minifloat.kernels import native
from minifloat.kernels.native import structs

E4M3 = (8, 3, -6, 448.0)


@pytest.fixture
def kernels() -> native.Library:
    library = native.load()
    if library is None:
        pytest.skip("no native library")
    return library


def rounding(element: tuple[int, int, int, float]) -> structs.RoundInputsArgs:
    """Arguments of no rows, which only the check of the format can refuse."""
    args = structs.RoundInputsArgs()
    args.rows, args.cols, args.x_stride, args.dtype, args.scaling, args.threads = 0, 16, 16, 0, 1, 1
    args.element = structs.Format(*element)
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
    kernels.round_inputs(rounding(E4M3))
    with pytest.raises(ValueError, match="status 2"):
        kernels.round_inputs(rounding(element))


@pytest.mark.parametrize(("rows", "cols"), [(2**62, 32), (32, 2**62), (2**31, 2**31)])
def test_a_weight_of_impossible_sizes_has_no_packed_form(kernels: native.Library, rows: int, cols: int) -> None:
    args = structs.PackArgs()
    args.rows, args.cols, args.block_rows, args.block_cols, args.element, args.grid = rows, cols, 1, 2**62, 0, 0
    assert kernels.packed_bytes(args) == 0
    args.rows = args.cols = 32
    assert kernels.packed_bytes(args) > 0
