"""`linear` with quantized inputs: against the product of the codes in float64, and against torch's own FP8 product."""

from __future__ import annotations

import pytest
import torch

from minifloat.errors import KernelUnavailable, UnsupportedTensorError
from minifloat.kernels.linear import linear
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.granularity import GROUP_16, GROUP_32
from minifloat.numerics.scheme import SCHEMES, ActivationSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

ROWS, COLS = 261, 160
W8A8 = [name for name, scheme in SCHEMES.items() if scheme.activation is not None]


def quantized(scheme: str) -> QuantizedTensor:
    return quantize_tensor(torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1)), SCHEMES[scheme].weight)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def options(scheme: str) -> tuple[ActivationSpec, torch.Tensor | None]:
    activation = SCHEMES[scheme].activation
    assert activation is not None
    if activation.has_global_scale:
        return activation, torch.tensor(2688 / 4.5)
    return activation, torch.tensor(3.0 / 448) if activation.needs_calibration else None


def exact(x: torch.Tensor, weight: QuantizedTensor, scheme: str) -> torch.Tensor:
    """The product of what the codes of both sides stand for, in float64."""
    activation, scale = options(scheme)
    codes, grid = quantize_activation(x, activation, scale)
    return dequantize_activation(codes, grid, activation).double() @ weight.dequantize().double().T


@pytest.mark.parametrize("scheme", W8A8)
def test_both_sides_are_quantized_and_summed_in_float32(scheme: str) -> None:
    weight, x, bias = quantized(scheme), inputs(3, 5, COLS), inputs(ROWS)
    activation, scale = options(scheme)
    result = linear(x, weight, bias, activation=activation, input_scale=scale)
    expected = exact(x, weight, scheme) + bias.double()
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2.0**-20 * float(expected.abs().max()))
    assert (result - linear(x, weight, bias)).abs().max() > 0.05  # and the inputs really are


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", W8A8)
def test_a_16_bit_result_is_rounded_once_after_the_bias(scheme: str, dtype: torch.dtype) -> None:
    weight, x, bias = quantized(scheme), inputs(64, COLS, dtype=dtype), inputs(ROWS, dtype=dtype) * 1e2
    activation, scale = options(scheme)
    result = linear(x, weight, bias, activation=activation, input_scale=scale)
    in_float32 = linear(x.float(), weight, bias.float(), activation=activation, input_scale=scale)
    assert result.dtype == dtype
    assert torch.equal(result, in_float32.to(dtype))
    without_bias = linear(x, weight, activation=activation, input_scale=scale)
    if scheme != "mxfp4-w4a4":  # whose products have so few bits that 16 bits may hold them exactly
        assert not torch.equal(result, without_bias + bias)  # which rounds twice


def test_the_result_is_that_of_the_fp8_product_of_torch() -> None:
    weight, x = quantized("fp8-dynamic"), inputs(7, COLS)
    activation, _ = options("fp8-dynamic")
    codes, grid = quantize_activation(x, activation)
    a, b = codes.view(torch.float8_e4m3fn), weight.codes.view(torch.float8_e4m3fn)
    try:
        expected = torch._scaled_mm(a, b.T, grid, weight.scale.T, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch multiplies no FP8 by rows here: {error}")
    tolerance = 2.0**-20 * float(expected.abs().max())
    torch.testing.assert_close(linear(x, weight, activation=activation), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheme", W8A8)
def test_nan_in_one_token_stays_in_that_token(scheme: str) -> None:
    x = inputs(3, COLS)
    x[1, 5] = torch.nan
    activation, scale = options(scheme)
    result = linear(x, quantized(scheme), activation=activation, input_scale=scale)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("shape", [(COLS,), (0, COLS), (2, 0, COLS), (2, 3, COLS)])
@pytest.mark.parametrize("scheme", W8A8)
def test_any_leading_shape_is_kept(scheme: str, shape: tuple[int, ...]) -> None:
    activation, scale = options(scheme)
    result = linear(inputs(*shape), quantized(scheme), activation=activation, input_scale=scale)
    assert result.shape == (*shape[:-1], ROWS)


@pytest.mark.parametrize(
    ("scheme", "activation"),
    [
        ("mxfp8", ActivationSpec(E4M3, GROUP_32, dynamic=True)),
        ("nvfp4", ActivationSpec(E2M1, GROUP_16, dynamic=True)),
    ],
)
def test_inputs_in_other_formats_are_refused(scheme: str, activation: ActivationSpec) -> None:
    with pytest.raises(UnsupportedTensorError, match="such weights run weight-only"):
        linear(inputs(2, COLS), quantized(scheme), activation=activation)


def test_a_static_spec_needs_its_scale() -> None:
    with pytest.raises(ValueError, match="needs a scale"):
        linear(inputs(2, COLS), quantized("fp8-static"), activation=SCHEMES["fp8-static"].activation)


def test_an_implementation_that_does_not_exist_is_unavailable_for_quantized_inputs_too() -> None:
    with pytest.raises(KernelUnavailable, match="available: auto, reference"):
        linear(inputs(2, COLS), quantized("fp8-dynamic"), impl="cutlass", activation=options("fp8-dynamic")[0])
