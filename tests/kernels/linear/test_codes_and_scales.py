"""Every code times every scale: with a single non-zero element of x, a result is one product that is rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    DTYPES,
    KINDS,
    Element,
    Kernels,
    Packed,
    Stored,
    assert_close,
    finite_codes,
    make,
    product,
    values_of,
)

from minifloat.numerics.formats import E2M1, E4M3, ElementFormat

#: Rows of x in one call: one path or another computes them.
TOGETHER = (1, 5, 16, 33, 128)
#: The smallest number that every path counts: tiles take what is below for zero.
SMALLEST = torch.finfo(torch.float32).smallest_normal


def one_at_a_time(kernels: Kernels, packed: Packed, dtype: torch.dtype, value: float, together: int) -> torch.Tensor:
    """``[K, N]``: column k of the weight times `value`, for every k."""
    cols = packed.stored.shape[1]
    x = torch.eye(cols, dtype=dtype) * value
    return torch.cat([kernels.linear(rows, packed) for rows in x.split(together)])


def assert_products(kernels: Kernels, stored: Stored, value: float, dtype: torch.dtype, together: int) -> None:
    """Every element of the weight times `value` is exact, or rounded once."""
    result = one_at_a_time(kernels, kernels.pack(stored), dtype, value, together)
    exact = stored.values().T * value
    normal = (exact.abs() >= SMALLEST) | (exact == 0)
    assert normal.any()
    assert torch.equal(result[normal], exact.float().to(dtype)[normal])
    assert (result[~normal].abs() <= SMALLEST).all()


def table(element_codes: torch.Tensor, rows: int) -> torch.Tensor:
    """uint8 ``[rows, K]``: all codes in every row, K filled up to whole groups."""
    cols = -(-len(element_codes) // 32) * 32
    return torch.cat([element_codes, element_codes[: cols - len(element_codes)]]).expand(rows, cols).contiguous()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_product_alone_is_rounded_once(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored = make(kind, 70, 140)
    for together in TOGETHER:
        assert_products(kernels, stored, 4.0, dtype, together)


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-channel", "fp8-block-128", "fp8-group-32"])
@pytest.mark.parametrize("scale", [1.0, 0.0123, 2.0**-100, 1.7 * 2.0**100, 2.0**-120, 3e30])
def test_every_e4m3_code_with_a_float_scale(kernels: Kernels, kind: str, scale: float) -> None:
    codes = table(finite_codes(E4M3), 40)
    grid = make(kind, *codes.shape).scales
    assert grid is not None
    stored = Stored(KINDS[kind], codes, torch.full_like(grid, scale))
    for together in (1, 16, 128):
        assert_products(kernels, stored, 1.0, torch.float32, together)
        assert_products(kernels, stored, 1.0, torch.bfloat16, together)


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-block-128", "mxfp8"])
@pytest.mark.parametrize("one_in", [7, 500])
def test_zeros_and_subnormals_are_decoded_beside_normal_numbers(kernels: Kernels, kind: str, one_in: int) -> None:
    # Paths look at the first columns to choose how they decode the others; here there is nothing to see in those.
    first = 64
    codes = finite_codes(E4M3)
    rare = codes[codes & 0x7F < 1 << E4M3.mantissa_bits]
    normal = table(codes[codes & 0x7F >= 1 << E4M3.mantissa_bits], 70).repeat(1, 2)
    later = torch.randint(one_in, normal[:, first:].shape) == 0
    normal[:, first:][later] = rare.repeat(-(-int(later.sum()) // len(rare)))[: int(later.sum())]
    stored = Stored(KINDS[kind], normal, make(kind, *normal.shape).scales)
    for together in TOGETHER:
        assert_products(kernels, stored, 1.0, torch.float32, together)


@pytest.mark.parametrize("kind", ["fp8-block-128", "fp8-block-64", "fp8-block-48x96", "fp8-group-128"])
@pytest.mark.parametrize("ratio", [255.0, 257.0, 2.0**40, 2.0**200, 0.0])
def test_scales_of_neighbouring_blocks_may_differ_by_any_factor(kernels: Kernels, kind: str, ratio: float) -> None:
    stored = make(kind, 70, 700)
    grid = stored.scales
    assert grid is not None
    # Blocks of columns in turn: large, small, small, large, so that a sum meets every order of the two.
    small = (torch.arange(grid.shape[1]) // 2 % 2 + torch.arange(grid.shape[1])) % 2 == 1
    large_scale, small_scale = (ratio**0.5, ratio**-0.5) if ratio else (1.0, 0.0)
    stored = replace(stored, scales=grid * torch.where(small, small_scale, large_scale))
    block, values, packed = stored.block[1], stored.values(), kernels.pack(stored)
    random = torch.Generator().manual_seed(3)
    for m in (13, 24, 40, 128):
        # Each row of x is zero outside of one block, so that no large block hides the error of a small one.
        owner = torch.arange(m) % grid.shape[1]
        x = torch.randn(m, 700, generator=random) * (torch.arange(700) // block == owner[:, None])
        x = x.bfloat16()
        result, exact = kernels.linear(x, packed), product(x, values)
        for b in owner.unique().tolist():
            rows, cols = owner == b, slice(b * block, (b + 1) * block)
            assert_close(result[rows], exact[rows], x[rows][:, cols], values[:, cols])


@pytest.mark.parametrize(("kind", "element"), [("mxfp8", E4M3), ("mxfp4", E2M1)])
@pytest.mark.parametrize("value", [2.0**-100, 1.0, 2.0**100])
def test_every_code_with_every_e8m0_scale(kernels: Kernels, kind: str, element: ElementFormat, value: float) -> None:
    codes = table(finite_codes(element), 255)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, codes.shape[1] // 32)
    stored = Stored(KINDS[kind], codes, scales)
    packed = kernels.pack(stored)
    exact = stored.values().T * value
    # A path may apply the scale of a row last: the sum before it is then this.
    unscaled = (values_of(element)[codes[0].long()] * value).abs()[:, None]
    normal = (exact == 0) | ((exact.abs() >= SMALLEST) & (unscaled >= SMALLEST))
    representable = exact.float().double() == exact
    for together in TOGETHER:
        for dtype in (torch.bfloat16, torch.float32):
            result = one_at_a_time(kernels, packed, dtype, value, together)
            expected = exact.float().to(dtype)
            assert torch.equal(result[normal & representable], expected[normal & representable])
            assert torch.equal(result.isinf(), expected.isinf())


@pytest.mark.parametrize(("kind", "element"), [("mxfp8", E4M3), ("mxfp4", E2M1)])
def test_e8m0_scales_of_a_row_may_differ_by_125_powers_of_two(
    kernels: Kernels, kind: str, element: ElementFormat
) -> None:
    codes = finite_codes(element)
    groups = 126  # 0 to 125 powers of two below the largest
    every_code = codes[torch.arange(32 * groups) * 5 % len(codes)]
    rows = torch.stack([every_code.roll(shift) for shift in range(0, 64, 2)] * 2)
    picks = torch.arange(0, 32 * groups, 61)
    x = torch.zeros(len(picks), 32 * groups)
    x[torch.arange(len(picks)), picks] = 1.0
    for largest in (254, 200, 126):
        scales = torch.stack([(largest - torch.arange(groups)).roll(shift) for shift in range(len(rows))])
        stored = Stored(KINDS[kind], rows, scales.to(torch.uint8))
        packed, exact = kernels.pack(stored), stored.values().T[picks]
        for together in (1, 16, 40):
            result = torch.cat([kernels.linear(part, packed) for part in x.split(together)])
            assert torch.equal(result.double(), exact.float().double())


def test_every_e2m1_code_with_every_e4m3_scale(kernels: Kernels) -> None:
    scales = finite_codes(E4M3)
    codes = table(finite_codes(E2M1), len(scales))
    for factor in (1.0, 2.0**-90, 0.3):
        grid = scales[:, None].expand(-1, codes.shape[1] // 16)
        for together in TOGETHER:
            for dtype in (torch.bfloat16, torch.float32):
                assert_products(kernels, Stored(KINDS["nvfp4"], codes, grid, factor), 1.0, dtype, together)


def test_e4m3_scales_of_all_sizes_in_one_row(kernels: Kernels) -> None:
    scales = finite_codes(E4M3)
    codes = finite_codes(E2M1).repeat(len(scales))[None].expand(3, -1).contiguous()
    grid = torch.stack([scales, scales.flip(0), scales.roll(17)])
    for together in (16, 128):
        assert_products(kernels, Stored(KINDS["nvfp4"], codes, grid), 1.0, torch.float32, together)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_a_block_of_zeros_with_a_huge_scale_does_not_flush_small_blocks(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 33, 160)
    assert stored.scales is not None
    stored.codes[:, 32:96] = 0
    stored.codes[::2, 40:90] = 0x80 if kind == "mxfp8" else 0x8  # zeros have signs
    stored.scales[:, 1:3] = 254
    stored.scales[:, (0, 3, 4)] = torch.tensor([1, 7, 100], dtype=torch.uint8)
    exact = stored.values().T * 2.0**20
    for together in TOGETHER:
        result = one_at_a_time(kernels, kernels.pack(stored), torch.float32, 2.0**20, together)
        assert torch.equal(result.double(), exact)


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_a_row_of_zeros_is_zero_whatever_its_scales(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 40, 100)
    assert stored.scales is not None
    stored.codes[7] = 0
    stored.scales[7] = torch.tensor([254, 0, 3, 254], dtype=torch.uint8)
    for m in TOGETHER:
        assert (kernels.linear(torch.randn(m, 100) * 1e10, kernels.pack(stored))[:, 7] == 0).all()


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
def test_a_block_far_below_the_largest_of_its_row_adds_nothing_that_float32_would_show(
    kernels: Kernels, kind: str
) -> None:
    stored = make(kind, 40, 128)
    assert stored.scales is not None
    stored.scales[:] = torch.tensor([254, 254 - 126, 0, 254 - 125], dtype=torch.uint8)
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)) * 2.0**-20
    exact = x.double() @ stored.values().T
    for m in TOGETHER:
        result = kernels.linear(x[:m], kernels.pack(stored)).double()
        assert float((result - exact[:m]).norm() / exact[:m].norm()) < 1e-6


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.element is Element.E4M3])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_makes_its_row_nan_and_no_other(kernels: Kernels, kind: str, code: int) -> None:
    clean = make(kind, 70, 100)
    for row, col in ((0, 0), (31, 99), (32, 63), (69, 64), (47, 31)):
        stored = Stored(clean.kind, clean.codes.clone(), clean.scales, clean.factor)
        stored.codes[row, col] = code
        assert_nan_only_in(kernels, stored, clean, row)


@pytest.mark.parametrize(("kind", "code"), [("mxfp8", 255), ("mxfp4", 255), ("nvfp4", 0x7F), ("nvfp4", 0xFF)])
def test_a_nan_scale_makes_its_row_nan_and_no_other(kernels: Kernels, kind: str, code: int) -> None:
    clean = make(kind, 70, 100)
    assert clean.scales is not None
    for row, group in ((0, 0), (31, -1), (32, 1), (69, 2)):
        stored = Stored(clean.kind, clean.codes, clean.scales.clone(), clean.factor)
        assert stored.scales is not None
        stored.scales[row, group] = code
        assert_nan_only_in(kernels, stored, clean, row)
        stored.codes[row] = 0  # zeros times NaN are NaN
        assert_nan_only_in(kernels, stored, clean, row)
        clean.codes[:] = make(kind, 70, 100).codes


def assert_nan_only_in(kernels: Kernels, stored: Stored, clean: Stored, row: int) -> None:
    others = torch.arange(stored.shape[0]) != row
    packed, packed_clean = kernels.pack(stored), kernels.pack(clean)
    for m in TOGETHER:
        for x in (torch.ones(m, 100, dtype=torch.bfloat16), torch.zeros(m, 100)):
            result = kernels.linear(x, packed)
            assert result[:, row].isnan().all()
            assert torch.equal(result[:, others], kernels.linear(x, packed_clean)[:, others])


@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-channel", "fp8-block-64", "fp8-group-128"])
def test_a_nan_float_scale_makes_what_it_scales_nan(kernels: Kernels, kind: str) -> None:
    stored = make(kind, 70, 140)
    assert stored.scales is not None
    stored.scales[-1, -1] = torch.nan
    expected = stored.scale_values().isnan().any(1)
    for m in TOGETHER:
        result = kernels.linear(torch.ones(m, 140, dtype=torch.bfloat16), kernels.pack(stored))
        assert torch.equal(result.isnan(), expected.expand(m, -1))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_of_floats_may_hold_any_number(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    stored = make(kind, 40, 100)
    stored.codes[3, 5], stored.codes[7, 99], stored.codes[33, 0] = torch.inf, torch.nan, -torch.inf
    stored.codes[35] *= 1e30
    stored.codes[36] *= 1e-30
    x = torch.ones(33, 100, dtype=dtype)
    exact = x.double() @ stored.values().T
    for m in TOGETHER[:4]:
        result = kernels.linear(x[:m], kernels.pack(stored)).float()
        expected = exact[:m].to(dtype).float()
        torch.testing.assert_close(
            result, expected, rtol=2.0**-7, atol=torch.finfo(dtype).smallest_normal, equal_nan=True
        )
