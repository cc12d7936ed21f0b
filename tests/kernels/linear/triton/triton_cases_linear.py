"""The kernels in Triton's interpreter; `test_compiled` runs pytest on this file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from gpu_cases import GPU_KINDS, case, quantized
from kernel_cases import assert_close, finite_codes, garbage, inputs, make, product, written
from modes import each_value

from minifloat.kernels.linear.triton.config import Config
from minifloat.kernels.linear.triton.kernels import parts_of
from minifloat.kernels.linear.triton.layout import Order
from minifloat.kernels.linear.triton.product import dequantize, multiply
from minifloat.kernels.linear.triton.weight import GpuWeight, arrange
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.tensor import QuantizedTensor

# The interpreter rounds bfloat16 wrongly: weights decode to float32 here, and bfloat16 results are not compared.
SMALL, TWO_STEPS, LARGE = Config(16, 64, 1, 4, 2, 1), Config(16, 128, 2, 4, 2, 1), Config(64, 256, 1, 8, 2, 1)


def split(config: Config, parts: int) -> Config:
    return Config(config.rows_m, config.rows_n, config.tiles, config.warps, config.stages, parts)


def run(x: torch.Tensor, weight: GpuWeight, config: Config, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The result, in float32 where the inputs are bfloat16, between other memory, which must not be written to."""
    dtype = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
    rows = weight.shape[0]
    y = garbage(x.shape[0] + 2, rows + 3, dtype)
    multiply(x, weight, bias, y[1:-1, 1 : rows + 1], config)
    assert written(y[1:-1, 1 : rows + 1]).all()
    assert int(written(y).sum()) == x.shape[0] * rows
    return y[1:-1, 1 : rows + 1]


def cases() -> Iterator[tuple[str, Order]]:
    """Each kind, in one order or the other, two of them in both."""
    for index, kind in enumerate(GPU_KINDS):
        yield kind, Order(index % 2)
    yield from (("fp8-channel", Order.NARROW), ("mxfp4", Order.NARROW), ("nvfp4", Order.WIDE))


kinds = pytest.mark.parametrize(("kind", "order"), sorted(set(cases())))


@pytest.mark.parametrize(("kind_and_order", "shape"), each_value(sorted(set(cases())), [(70, 160), (130, 256)]))
def test_the_product_matches_float64(kind_and_order: tuple[str, Order], shape: tuple[int, int]) -> None:
    (kind, order), (rows, cols) = kind_and_order, shape
    weight, values = case(kind, rows, cols)
    packed = arrange(weight, order)
    numbers = itertools.cycle((1, 3, 16, 17, 64, 129))
    configs = (SMALL, LARGE) if cols == 160 or "block" in kind or "group" in kind else (TWO_STEPS, LARGE)
    for config, dtype in itertools.product(configs, (torch.float32, torch.float16, torch.bfloat16)):
        x, bias = inputs(next(numbers), cols, dtype), inputs(1, rows, dtype)[0]
        assert_close(run(x, packed, config, bias), product(x, values, bias), x, values)
    assert_close(run(inputs(17, cols), packed, SMALL), product(inputs(17, cols), values), inputs(17, cols), values)


@pytest.mark.parametrize(("kind", "parts"), each_value(["fp8-block-128", "mxfp4"], [1, 2, 3, 4]))
def test_parts_of_k_are_added_up_in_their_order(kind: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr("minifloat.kernels.linear.triton.config.take", lambda *_: counts)
    weight, values = case(kind, 130, 640)
    packed, x = arrange(weight, Order.NARROW), inputs(17, 640)
    first = run(x, packed, split(SMALL, parts))
    assert_close(first, product(x, values), x, values)
    assert torch.equal(run(x, packed, split(SMALL, parts)), first)  # with the counters as the first run left them
    assert not counts.any()


def test_x_may_have_a_row_stride() -> None:
    weight, values = case("mxfp8", 70, 160)
    x = inputs(5, 200)[:, 7:167]
    assert_close(run(x, arrange(weight, Order.NARROW), SMALL), product(x, values), x, values)


def alone(weight: QuantizedTensor, order: Order) -> torch.Tensor:
    """``[N, K]``: every element of the weight as the product with a one makes it."""
    packed, cols = arrange(weight, order), weight.shape[1]
    return run(torch.eye(cols), packed, Config(64, 64, 1, 4, 2, 1)).T


def test_every_e4m3_code_decodes_to_its_value() -> None:
    stored = make("fp8-channel", 3, 256)
    codes = finite_codes(E4M3)
    stored.codes[:] = torch.cat([codes, codes[:2]])
    for order in Order:
        assert torch.equal(alone(quantized(stored), order).double(), stored.values().float().double())


def test_every_e2m1_code_with_every_e8m0_scale() -> None:
    stored = make("mxfp4", 255, 32)
    stored.codes[:] = finite_codes(E2M1).repeat(2)
    assert stored.scales is not None
    stored.scales[:] = torch.arange(255, dtype=torch.uint8)[:, None]
    result, exact = alone(quantized(stored), Order.NARROW), stored.values()
    representable = exact.float().double() == exact
    assert torch.equal(result.double()[representable], exact[representable])
    assert torch.equal(result.isinf(), exact.float().isinf())


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8"])
def test_e8m0_scales_of_a_row_may_differ_by_125_powers_of_two(kind: str) -> None:
    groups = 128
    stored = make(kind, 2, 32 * groups)
    assert stored.scales is not None
    distance = torch.arange(groups)
    stored.scales[:] = torch.stack([200 - distance, 200 - distance.roll(40)]).to(torch.uint8)
    x = torch.zeros(groups, 32 * groups)
    x[torch.arange(groups), torch.arange(groups) * 32 + 5] = 1.0
    exact = stored.values().T[torch.arange(groups) * 32 + 5]
    kept = torch.stack([distance, distance.roll(40)]).T <= 125
    result = run(x, arrange(quantized(stored), Order.WIDE), LARGE).double()
    assert torch.equal(result[kept], exact[kept])
    assert (result[~kept] == 0).all()


def test_every_e2m1_code_with_every_e4m3_scale() -> None:
    scales = finite_codes(E4M3)
    stored = make("nvfp4", len(scales), 16)
    stored.codes[:] = finite_codes(E2M1)
    assert stored.scales is not None
    stored.scales[:] = scales[:, None]
    for order in Order:
        assert torch.equal(alone(quantized(stored), order), quantized(stored).dequantize() + 0.0)


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-block-128", "mxfp8", "mxfp4", "nvfp4"])
def test_a_nan_makes_its_row_nan_and_no_other(kind: str) -> None:
    stored = make(kind, 70, 160)
    clean = run(inputs(3, 160), arrange(quantized(stored), Order.NARROW), SMALL)
    if kind in ("mxfp4", "nvfp4"):
        assert stored.scales is not None
        stored.scales[33, 1] = 255 if kind == "mxfp4" else 0x7F
    else:
        stored.codes[33, 17] = 0xFF
    result = run(inputs(3, 160), arrange(quantized(stored), Order.NARROW), SMALL)
    others = torch.arange(70) != 33
    assert result[:, 33].isnan().all()
    assert torch.equal(result[:, others], clean[:, others])


def test_a_nan_of_x_stays_in_its_row() -> None:
    packed, x = arrange(case("fp8-channel", 70, 160)[0], Order.NARROW), inputs(3, 160, torch.float16)
    x[1, 4] = torch.nan
    result = run(x, packed, SMALL)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@kinds
def test_decoding_into_memory_gives_the_values(kind: str, order: Order) -> None:
    weight, values = case(kind, 200, 160)
    for dtype in (torch.float32, torch.float16):
        for first, last in ((0, 200), (128, 200), (64, 128)):
            out = torch.full((last - first, 160), torch.nan, dtype=dtype)
            dequantize(arrange(weight, order), out, first)
            torch.testing.assert_close(out.double(), values[first:last], rtol=torch.finfo(dtype).eps, atol=2.0**-25)


def test_a_large_product_decodes_some_rows_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.kernels.linear.triton.product.SCRATCH_BYTES", 128 * 160 * 4)
    weight, values = case("fp8-block-128", 300, 160)
    x, bias = inputs(7, 160), inputs(1, 300)[0]
    for each in (None, bias):
        assert_close(
            run(x, arrange(weight, Order.NARROW), Config(0, 0, 0, 0, 0, 0), each), product(x, values, each), x, values
        )


@triton.jit
def _parts_kernel(x_ptr, y_ptr, PARTS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :]
    parts = parts_of(tl.load(x_ptr + at), PARTS, 16, N, True)
    tl.store(y_ptr + tl.arange(0, 16 * PARTS)[:, None] * N + tl.arange(0, N)[None, :], parts)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float16, 2), (torch.float32, 4)])
def test_parts_of_x_are_bfloat16_and_add_up_to_it(dtype: torch.dtype, parts: int) -> None:
    x = inputs(16, 64, torch.float64) * 2.0 ** torch.arange(-14, 2).double()[:, None]
    x = x.to(dtype)
    x[3, :4] = torch.tensor([torch.inf, -torch.inf, torch.finfo(dtype).max, 0.0])
    y = torch.full((16 * parts, 64), torch.nan)
    _parts_kernel[(1,)](x, y, parts, 64)
    assert torch.equal(y.bfloat16().float(), y)
    assert torch.equal(y.double().view(16, parts, 64).sum(1), x.double())
