"""Extreme inputs: NaN and Inf, outliers, tiny and huge numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import (
    DTYPES,
    ENOUGH,
    FLOATS,
    KINDS,
    Kernels,
    assert_close,
    assert_within_bar,
    bits,
    flushing_subnormals,
    inputs,
    make,
    product,
)

from minifloat.kernels import native
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import pack

M = (1, 2, 5, 16, 33, 100)
WIDE = (torch.bfloat16, torch.float32)  # dtypes with the exponents of float32

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("specials", [(torch.nan,), (torch.inf,), (-torch.inf,), (torch.inf, -torch.inf)], ids=str)
def test_nan_and_inf_spread_as_in_a_matrix_product(
    kernels: Kernels, kind: str, dtype: torch.dtype, specials: tuple[float, ...]
) -> None:
    stored = make(kind, 70, 100)
    packed, values = kernels.pack(stored), stored.values()
    for m in M:
        x = inputs(m, 100).to(dtype)
        row = m // 2
        for i, special in enumerate(specials):
            x[row, 37 + 40 * i] = special
        # Where all codes are drawn, zeros are among them: Inf times zero is NaN.
        expected = (x[row].double()[None, :] * values).sum(1).float()
        result = kernels.linear(x, packed)
        nonfinite = ~expected.isfinite()
        assert nonfinite.all()
        torch.testing.assert_close(result[row].float(), expected, rtol=0, atol=0, equal_nan=True)
        others = torch.arange(m) != row
        assert result[others].isfinite().all()


def massive(x: torch.Tensor) -> torch.Tensor:
    x[:, 17] *= 1e4
    x[3, 200] = -2.5e4
    return x * 1e-3  # and still no result is too large for half precision


def smallest_of_half(x: torch.Tensor) -> torch.Tensor:
    halves = (x * 1e-6).half()
    return halves.masked_fill(halves.abs() >= torch.finfo(torch.float16).smallest_normal, 0)


def powers(*shape: int) -> torch.Tensor:
    return 10.0 ** (torch.rand(*shape, generator=torch.Generator().manual_seed(3)) * 60 - 30)


EXTREMES: dict[str, tuple[int, tuple[torch.dtype, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a massive activation": (300, DTYPES, massive),
    "rows that differ by sixty powers of ten": (100, WIDE, lambda x: x * 10.0 ** torch.linspace(-30, 30, 100)[:, None]),
    "elements that differ by sixty powers of ten": (100, WIDE, lambda x: x * powers(*x.shape)),
    "the smallest numbers of half precision": (100, (torch.float16,), smallest_of_half),
}


@kinds
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_inputs_cost_no_accuracy(kernels: Kernels, kind: str, name: str) -> None:
    cols, dtypes, change = EXTREMES[name]
    stored = make(kind, 70, cols)
    packed, values = kernels.pack(stored), stored.values()
    for dtype in dtypes:
        x = change(inputs(100, cols)).to(dtype)
        exact = product(x, values)
        for m in M:
            for part in (slice(0, m), slice(100 - m, 100)):
                assert_close(kernels.linear(x[part], packed), exact[part], x[part], values)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_massive_activation_times_zero_weights_costs_no_accuracy(
    kernels: Kernels, kind: str, dtype: torch.dtype
) -> None:
    stored = make(kind, ENOUGH, 100)
    stored.codes[:, 17] = 0
    packed, values = kernels.pack(stored), stored.values()
    x = inputs(40, 100).to(dtype)
    x[:, 17] = 1e4
    exact = product(x, values)
    for m in (1, 4, 16, 40):
        assert_within_bar(kernels.linear(x[:m], packed), exact[:m])


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_that_cancel_do_not_lose_the_other_products(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored = make(kind, 70, 300)
    for col in (10, 250):  # elements and scales alike, so that the two products are each other's negative
        stored.codes[:, col] = stored.codes[:, 0]
    if stored.scales is not None:
        stored.scales[:] = stored.scales[:, :1]
    packed, values = kernels.pack(stored), stored.values()
    x = inputs(100, 300).to(dtype)
    x[:, 10], x[:, 250] = 4096.0, -4096.0
    exact = product(x, values)
    for m in M:
        assert_close(kernels.linear(x[:m], packed), exact[:m], x[:m], values)


@kinds
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("ratio", [1e4, 1e8])
def test_an_outlier_times_zeros_does_not_change_other_products(
    kernels: Kernels, kind: str, dtype: torch.dtype, ratio: float
) -> None:
    stored = make(kind, 70, 300)
    stored.codes[:, 10 // 2 if stored.codes.shape[1] < 300 else 10] = 0
    packed, values = kernels.pack(stored), stored.values()
    x = inputs(100, 300).to(dtype)
    x[:, 10] = ratio
    exact = product(x, values)
    for m in M:
        parts = [kernels.linear(part, packed) for part in x.split(m)]
        assert_within_bar(torch.cat(parts), exact)


@kinds
@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_subnormal_inputs_of_float32_range_add_less_than_any_normal_number(
    kernels: Kernels, kind: str, dtype: torch.dtype
) -> None:
    stored = make(kind, 70, 100)
    packed, values = kernels.pack(stored), stored.values()
    x = inputs(100, 100).to(dtype)
    smallest = torch.finfo(torch.float32).smallest_normal
    x[:, ::3] = torch.randint(-127, 128, (100, 34)).double().mul(smallest / 128).to(dtype)
    exact = product(x, values)
    for m in M:
        assert_close(kernels.linear(x[:m], packed), exact[:m], x[:m], values)
    x[:, :] = (inputs(100, 100).sign() * smallest / 2).to(dtype)
    exact = product(x, values)
    lengths = smallest * values.abs().sum(1)
    for m in M:
        result = kernels.linear(x[:m], packed).double()
        assert ((result - exact[:m]).abs() <= lengths).all()


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_floating_point_mode_of_the_caller_changes_no_bit(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored = make(kind, 70, 100)
    packed = kernels.pack(stored)
    tiny = torch.finfo(dtype).smallest_normal / 2
    for m in M:
        x = (inputs(m, 100) * (tiny if dtype is torch.float16 else 1)).to(dtype)
        x[:, ::2] = tiny
        expected = kernels.linear(x, packed)
        with flushing_subnormals():
            result = kernels.linear(x, packed)
        assert torch.equal(bits(result), bits(expected))


@kinds
def test_a_result_too_large_for_its_dtype_is_inf(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 100)
    if stored.kind.element in FLOATS:
        stored.codes.mul_(100)
    if kind == "mxfp4":
        stored.scales.add_(8)
    packed, values = kernels.pack(stored), stored.values()
    x = torch.full((100, 100), 6e4, dtype=torch.float16)
    exact = product(x, values)
    expected = exact.to(torch.float16)
    clear = (exact.abs() - 65520).abs() > 1.0
    assert expected.isinf().any()
    for m in M:
        result = kernels.linear(x[:m], packed)
        assert torch.equal(result.isinf()[clear[:m]], expected.isinf()[:m][clear[:m]])
        assert not result.isnan().any()


@kinds
def test_zeros_give_the_bias_exactly(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 100)
    packed = kernels.pack(stored)
    for dtype in DTYPES:
        for bias in (inputs(1, 70)[0], inputs(1, 70)[0].bfloat16()):
            for m in M:
                result = kernels.linear(torch.zeros(m, 100, dtype=dtype), packed, bias)
                assert torch.equal(result, bias.to(dtype).expand(m, -1))


def test_dot_products_of_bfloat16_have_no_subnormal_inputs(kernels: Kernels) -> None:
    """The instruction sets with such products count inputs below 2^-126 as zero; the others keep them."""
    flushes = kernels.library.isa in ("amx", "avx512_bf16")
    weight = torch.full((40, 64), 2.0**100, dtype=torch.bfloat16)
    x = torch.zeros(16, 64, dtype=torch.bfloat16)
    x[:, 3] = 2.0**-127
    x[1, 4] = 2.0**-20
    with native.using(kernels.library.isa):
        result = linear(x, pack(weight)).float()
    assert (result[0] == (0.0 if flushes else 2.0**-27)).all()
    assert (result[1] == 2.0**80).all()
