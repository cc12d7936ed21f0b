"""`linear` against the plain product with the dequantized weight, on ragged shapes, for every scheme."""

import pytest
import torch

from minifloat.errors import KernelUnavailable, ShapeError, UnsupportedTensorError
from minifloat.kernels.linear import linear, reference
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

#: Rows that no block of 128 divides; columns that the groups of 32 and 16 divide, but no block of 128.
ROWS, COLS = 261, 160


def quantized(scheme: str, rows: int = ROWS, cols: int = COLS) -> QuantizedTensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    return quantize_tensor(weight, SCHEMES[scheme].weight)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_that_of_the_dequantized_weight_in_the_dtype_of_x(scheme: str, dtype: torch.dtype) -> None:
    weight, x, bias = quantized(scheme), inputs(3, 5, COLS, dtype=dtype), inputs(ROWS, dtype=dtype)
    expected = torch.nn.functional.linear(x, weight.dequantize(torch.float32).to(dtype), bias)
    result = linear(x, weight, bias)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cutting_the_weight_into_slabs_changes_only_the_order_of_summation(scheme: str) -> None:
    weight, x, bias = quantized(scheme), inputs(7, COLS), inputs(ROWS)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    for slab_bytes in (0, 3 * COLS * 4, 130 * COLS * 4):
        result = reference.linear(x, weight, bias, slab_bytes)
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(COLS,), (1, COLS), (0, COLS), (2, 3, 4, COLS)])
def test_any_leading_shape_is_kept(shape: tuple[int, ...]) -> None:
    assert linear(inputs(*shape), quantized("fp8")).shape == (*shape[:-1], ROWS)


def test_nan_in_one_row_of_x_stays_in_that_row() -> None:
    x = inputs(3, COLS)
    x[1, 5] = torch.nan
    result = linear(x, quantized("mxfp4"))
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


def test_x_of_the_wrong_width_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"expected \[\.\.\., 160\].*got \[2, 159\]"):
        linear(inputs(2, COLS - 1), quantized("fp8"))


def test_a_bias_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ShapeError, match="bias"):
        linear(inputs(2, COLS), quantized("fp8"), inputs(ROWS - 1))


def test_integers_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="int64"):
        linear(torch.ones(2, COLS, dtype=torch.int64), quantized("fp8"))


def test_an_implementation_that_does_not_exist_is_unavailable() -> None:
    with pytest.raises(KernelUnavailable, match="available: auto, reference"):
        linear(inputs(2, COLS), quantized("fp8"), impl="cutlass")
