"""The public functions on packed weights: shapes and views of x, and every refused argument."""

from __future__ import annotations

import functools

import pytest
import torch

from minifloat.errors import NonFiniteError, ShapeError, TensorError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.linear import linear, linear_fused
from minifloat.kernels.pack import PackedWeight, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

ROWS, COLS = 47, 96
#: Past the fields ``magic, version, element, grid`` of ``struct Header``: its rows.
OFFSET_OF_ROWS = 16

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
schemes = pytest.mark.parametrize("scheme", SCHEMES)


def quantized(scheme: str, rows: int = ROWS, cols: int = COLS) -> QuantizedTensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    return quantize_tensor(weight, SCHEMES[scheme].weight)


@functools.cache
def packed(scheme: str = "mxfp4", rows: int = ROWS) -> PackedWeight:
    return pack(quantized(scheme, rows))


def inputs(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@schemes
def test_packed_weights_give_the_product_of_the_quantized_weights(scheme: str) -> None:
    weight, x, bias = quantized(scheme), inputs(40, COLS, dtype=torch.float32), inputs(ROWS, dtype=torch.float32)
    exact = x.double() @ weight.dequantize().double().T + bias.double()
    for impl in ("auto", "cpu", "reference"):
        result = linear(x, pack(weight), bias, impl=impl)
        assert float((result.double() - exact).norm() / exact.norm()) < 1e-6


@schemes
def test_views_of_x_are_read_with_their_strides(scheme: str) -> None:
    weight = packed(scheme)
    x = inputs(6, COLS)
    expected = linear(x, weight)
    wide = torch.full((6, 2 * COLS + 1), torch.nan, dtype=x.dtype)
    wide[:, COLS + 1 :] = x
    spread = torch.full((6, COLS, 3), torch.nan, dtype=x.dtype)
    spread[:, :, 1] = x
    backwards = x.flip(0).contiguous().flip(0)
    for view in (x.T.contiguous().T, wide[:, COLS + 1 :], spread[:, :, 1], backwards, x.view(2, 3, COLS)):
        assert torch.equal(linear(view, weight).view(6, ROWS), expected)
    alternate = inputs(12, COLS)[::2]
    assert torch.equal(linear(alternate, weight), linear(alternate.contiguous(), weight))
    heads = x.view(2, 3, COLS).transpose(0, 1)
    assert torch.equal(linear(heads, weight), linear(heads.contiguous(), weight))


@pytest.mark.parametrize("shape", [(COLS,), (1, COLS), (0, COLS), (2, 0, COLS), (2, 3, 4, COLS)])
def test_any_leading_shape_is_kept(shape: tuple[int, ...]) -> None:
    x = inputs(*shape)
    assert linear(x, packed()).shape == (*shape[:-1], ROWS)
    parts = linear_fused(x, [packed(), packed(rows=33)])
    assert [part.shape for part in parts] == [(*shape[:-1], ROWS), (*shape[:-1], 33)]


def test_views_of_codes_and_scales_are_packed() -> None:
    for scheme in ("fp8-block", "fp8", "mxfp4", "nvfp4"):
        weight = quantized(scheme, 300, 512)
        expected = pack(weight).data
        codes = torch.stack([weight.codes, torch.full_like(weight.codes, 0x7F)], dim=-1)[..., 0]
        scale = weight.scale.T.contiguous().T
        views = QuantizedTensor(weight.spec, weight.shape, codes, scale, weight.global_scale, weight.global_divides)
        assert torch.equal(pack(views).data, expected)


def test_a_bias_may_be_a_view() -> None:
    x, bias = inputs(5, COLS), inputs(2 * ROWS, dtype=torch.float32)
    assert torch.equal(linear(x, packed(), bias[::2]), linear(x, packed(), bias[::2].contiguous()))
    result = linear_fused(x, [packed(), packed()], [bias[::2], bias[1::2]])
    assert torch.equal(result[1], linear(x, packed(), bias[1::2].contiguous()))


def test_biases_of_one_call_are_of_one_dtype() -> None:
    biases = [inputs(ROWS), inputs(ROWS, dtype=torch.float32)]
    with pytest.raises(UnsupportedTensorError, match=r"biases.*bfloat16, torch\.float32"):
        linear_fused(inputs(5, COLS), [packed(), packed()], biases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_a_bias_of_a_dtype_without_a_kernel_is_refused(dtype: torch.dtype) -> None:
    bias = torch.zeros(ROWS, dtype=dtype)
    with pytest.raises(UnsupportedTensorError, match=r"bias.*" + str(dtype)):
        linear(inputs(5, COLS), packed(), bias)
    with pytest.raises(UnsupportedTensorError, match=r"bias.*" + str(dtype)):
        linear_fused(inputs(5, COLS), [packed(), packed()], [None, bias])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_an_x_of_a_dtype_without_a_kernel_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedTensorError, match=str(dtype)):
        linear(torch.zeros(2, COLS).to(dtype), packed())
    with pytest.raises(UnsupportedTensorError, match=str(dtype)):
        linear_fused(torch.zeros(2, COLS).to(dtype), [packed()])


def test_x_and_bias_on_another_device_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"x.*meta"):
        linear(torch.zeros(2, COLS, device="meta"), packed())
    with pytest.raises(UnsupportedTensorError, match=r"bias.*meta"):
        linear(inputs(5, COLS), packed(), torch.zeros(ROWS, device="meta"))


@pytest.mark.parametrize("shape", [(2, COLS - 1), (2, COLS + 1), (COLS, 2), ()])
def test_an_x_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=rf"expected \[\.\.\., {COLS}\]"):
        linear(inputs(*shape), packed())
    with pytest.raises(ShapeError, match=rf"expected \[\.\.\., {COLS}\]"):
        linear_fused(inputs(*shape), [packed()])


@pytest.mark.parametrize("shape", [(ROWS - 1,), (ROWS + 1,), (1, ROWS), ()])
def test_a_bias_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=rf"bias: expected \[{ROWS}\]"):
        linear(inputs(2, COLS), packed(), inputs(*shape))
    with pytest.raises(ShapeError, match=rf"bias: expected \[{ROWS}\]"):
        linear_fused(inputs(2, COLS), [packed()], [inputs(*shape)])


def test_weights_of_several_kinds_in_one_call_are_refused() -> None:
    for other in ("mxfp8", "nvfp4", "fp8"):
        with pytest.raises(UnsupportedTensorError, match="kind"):
            linear_fused(inputs(2, COLS), [packed(), packed(other)])


def test_a_call_without_weights_is_refused() -> None:
    with pytest.raises(ShapeError, match="weights: expected at least one"):
        linear_fused(inputs(2, COLS), [])


def test_bytes_that_are_no_packed_weight_are_refused() -> None:
    good = packed()
    x = inputs(2, COLS)
    changed = good.data.clone()
    changed[0] = 0
    old = good.data.clone()
    old[4] = 99
    rows = good.data.clone()
    rows[OFFSET_OF_ROWS] = ROWS + 1
    shifted = torch.cat([good.data[:1], good.data])[1:]
    for data, message in (
        (changed, "not those of a packed weight"),
        (old, "version 99"),
        (rows, f"{ROWS + 1}x{COLS}"),
        (good.data[:-1], "bytes in"),
        (good.data[:40], "fewer than a header"),
        (good.data[:0], "fewer than a header"),
        (shifted, "64-byte aligned"),
        (good.data.view(torch.int8), "int8"),
        (torch.stack([good.data, good.data], dim=-1)[:, 0], "contiguous"),
        (good.data.to("meta"), "meta"),
    ):
        with pytest.raises(TensorError, match=message):
            linear(x, PackedWeight(data, good.spec, good.shape))
        with pytest.raises(TensorError, match=message):
            PackedWeight(data, good.spec, good.shape).unpack()


def test_a_packed_weight_of_another_shape_or_scheme_is_refused() -> None:
    good = packed()
    with pytest.raises(ShapeError, match=f"expected a packed weight {ROWS + 1}x{COLS}"):
        linear(inputs(2, COLS), PackedWeight(good.data, good.spec, (ROWS + 1, COLS)))
    for other in ("nvfp4", "mxfp8", "fp8"):
        with pytest.raises(TensorError, match="data"):
            linear(inputs(2, COLS), PackedWeight(good.data, SCHEMES[other].weight, good.shape))
    with pytest.raises(TensorError, match="data"):
        linear(inputs(2, COLS), PackedWeight(good.data, None, good.shape))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scales_that_are_not_finite_are_refused(value: float) -> None:
    for scheme in ("fp8-static", "fp8", "fp8-block"):
        weight = quantized(scheme)
        weight.scale[-1, -1] = value
        with pytest.raises(NonFiniteError, match="scale"):
            pack(weight)
    weight = quantized("nvfp4")
    assert weight.global_scale is not None
    weight.global_scale.fill_(value if value == torch.nan else 0.0)
    with pytest.raises(NonFiniteError, match="global_scale"):
        pack(weight)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.zeros(4), "weight"),
        (torch.zeros(4, 4, dtype=torch.float64), "float64"),
        (torch.zeros(2, 4, 4).bfloat16(), "weight"),
        (torch.zeros(0, 4).bfloat16(), "empty"),
        (torch.zeros(4, 0).bfloat16(), "empty"),
        (torch.zeros(0, 0).bfloat16(), "empty"),
        (torch.zeros(4, 4, dtype=torch.bfloat16, device="meta"), "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{list(value.shape)} {value.dtype}",
)
def test_a_tensor_that_has_no_packed_form_is_refused(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(TensorError, match=words):
        pack(weight)
