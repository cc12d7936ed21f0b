"""Products in 16 bits that are computed in float32: results, gradients, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from minifloat.model.runtime import products
from minifloat.model.runtime.products import fast_products

_SLOW_DTYPES = products._slow_dtypes
#: How far one rounding to the dtype is from the exact value at most, and a little for sums in float32.
BOUNDS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
half = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_slow_dtypes", lambda: dict.fromkeys(BOUNDS, 0))


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Compare with the float64 result, element by element, as far as the length of the products allows."""
    assert found.dtype in BOUNDS
    length = exact.norm() / exact.numel() ** 0.5
    assert ((found.double() - exact).abs() <= BOUNDS[found.dtype] * exact.abs() + 1e-6 * length).all()


@half
@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        (linear, [(3, 5, 64), (40, 64), (40,)]),
        (linear, [(7, 64), (40, 64)]),
        (torch.mm, [(9, 33), (33, 20)]),
        (torch.matmul, [(2, 3, 9, 33), (2, 3, 33, 20)]),
        (torch.bmm, [(4, 9, 33), (4, 33, 20)]),
        (torch.addmm, [(20,), (9, 33), (33, 20)]),
        (torch.baddbmm, [(4, 9, 20), (4, 9, 33), (4, 33, 20)]),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_a_product_is_rounded_once(
    product: Callable[..., Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype, inference: bool
) -> None:
    inputs = [drawn(*shape, dtype=dtype) for shape in shapes]
    with torch.inference_mode(inference), fast_products():
        found = product(*inputs)
    assert_rounded(found, product(*(x.double() for x in inputs)))


@half
def test_gradients_of_a_linear_are_products_too(dtype: torch.dtype) -> None:
    x, weight, bias = (drawn(*shape, dtype=dtype).requires_grad_() for shape in ((3, 5, 64), (40, 64), (40,)))
    gradient = drawn(3, 5, 40, dtype=dtype)
    with fast_products():
        found = torch.autograd.grad(linear(x, weight, bias), [x, weight], gradient)
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    for one, other in zip(found, torch.autograd.grad(linear(*exact), exact[:2], gradient.double()), strict=True):
        assert_rounded(one, other)


def test_gradients_of_attention_are_those_of_float32_rounded() -> None:
    query, key, value = (drawn(1, 4, 20, 16 + i, dtype=torch.bfloat16)[..., :16].requires_grad_() for i in range(3))
    gradient = drawn(1, 4, 20, 16, dtype=torch.bfloat16)

    def gradients(inputs: list[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient)

    with fast_products():
        found = gradients([query, key, value], gradient)
    exact = gradients([x.detach().double().requires_grad_() for x in (query, key, value)], gradient.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - other).norm() / other.norm()) < 6e-3  # the backward pass reads rounded results


def test_a_large_matrix_becomes_float32_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [drawn(*shape, dtype=torch.bfloat16) for shape in ((6, 64), (50, 64), (50,))]
    monkeypatch.setattr(products, "_MOST_ELEMENTS", 64 * 7)
    monkeypatch.setattr(products, "_BUFFER", products._Buffer())
    with fast_products():
        found = linear(*inputs)
    assert products._BUFFER.values is not None
    assert products._BUFFER.values.numel() == 64 * 7
    assert_rounded(found, linear(*(x.double() for x in inputs)))


@half
def test_few_rows_are_torch_s_where_it_is_not_slow_in_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_slow_dtypes", lambda: dict.fromkeys(BOUNDS, 6))
    monkeypatch.setattr(products, "_BUFFER", products._Buffer())
    weight, bias = drawn(40, 64, dtype=dtype), drawn(40, dtype=dtype)
    with fast_products():
        for x in (drawn(5, 64, dtype=dtype), drawn(1, 5, 64, dtype=dtype)):
            assert torch.equal(linear(x, weight, bias), torch.ops.aten.linear(x, weight, bias))
        assert products._BUFFER.values is None
        for x in (drawn(6, 64, dtype=dtype), drawn(2, 3, 64, dtype=dtype)):
            assert_rounded(linear(x, weight, bias), linear(x.double(), weight.double(), bias.double()))
        assert products._BUFFER.values is not None


@pytest.mark.parametrize(
    ("isas", "rows"),
    [(("amx", "avx512_bf16"), None), (("avx512_bf16", "avx512"), None), (("avx512_vnni", "avx512"), 128)],
)
def test_bf16_is_slow_with_avx512_unless_its_products_are_fast(
    isas: tuple[str, ...], rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(products.native, "load", lambda: SimpleNamespace(isas=isas))
    assert _SLOW_DTYPES.__wrapped__().get(torch.bfloat16) == rows


def test_other_dtypes_and_operations_are_torch_s() -> None:
    x, weight = drawn(5, 64, dtype=torch.float32), drawn(8, 64, dtype=torch.float32)
    with fast_products():
        assert torch.equal(linear(x, weight), torch.ops.aten.linear(x, weight))
        assert torch.equal((x.bfloat16() * 3).softmax(-1), torch.softmax(x.bfloat16() * 3, -1))


def test_where_torch_is_fast_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_slow_dtypes", dict)
    assert isinstance(fast_products(), nullcontext)
