"""Tests of each scale rule against an independent formula, and of the search against brute force."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
import torch

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, E5M2, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, GROUP_128, TENSOR, Granularity
from minifloat.numerics.scale import cast_stats, choose_scales, effective_scale
from minifloat.numerics.scale_rules import (
    SEARCH_OFFSETS,
    amax,
    e8m0_scales,
    expand,
    float_scales,
    global_divisor,
    nvfp4_scales,
    search_e8m0_scales,
)
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec

GRANULARITIES = (TENSOR, CHANNEL, BLOCK_128, GROUP_128, GROUP_32, GROUP_16)
SHAPES = ((1, 1), (3, 5), (128, 128), (130, 257), (2, 48))
MX_RULES = (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL)

each_granularity = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_scheme = pytest.mark.parametrize("spec", [s.weight for s in SCHEMES.values()], ids=list(SCHEMES))
each_mx_element = pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda f: f.name)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks_of(
    shape: tuple[int, int], granularity: Granularity
) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Yield grid position and slices of every block."""
    rows, cols = granularity.rows or shape[0], granularity.cols or shape[1]
    for i, top in enumerate(range(0, shape[0], rows)):
        for j, left in enumerate(range(0, shape[1], cols)):
            yield (i, j), (slice(top, top + rows), slice(left, left + cols))


def float32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def interesting_amax(element: ElementFormat) -> torch.Tensor:
    """Return amaxes in all binades of float32, including subnormals, with mantissas around the rules' thresholds."""
    thresholds = [1.0, 1.5, 1.75, 2 - 2.0 ** -(element.mantissa_bits + 1), element.max / 2.0**element.emax]
    mantissas = np.array(thresholds, dtype=np.float32)
    neighbours = np.concatenate(
        [mantissas, np.nextafter(mantissas, np.float32(4)), np.nextafter(mantissas, np.float32(0))]
    )
    neighbours = np.append(neighbours, np.random.default_rng(0).uniform(1, 2, 8).astype(np.float32))
    exponents = np.arange(-149, 128)
    grid = np.ldexp(neighbours.astype(np.float64)[None, :], exponents[:, None]).astype(np.float32)
    return torch.from_numpy(grid[np.isfinite(grid) & (grid > 0)])


def exact_e8m0(value: float, element: ElementFormat, rule: ScaleRule) -> int:
    """Return the code of a rule by the formula of its paper, in float64 with frexp, clamped to 254."""
    if rule is ScaleRule.RCEIL:
        ratio = float(np.float32(value) / np.float32(element.max))
        mantissa, exponent = math.frexp(ratio)
        log2_scale = exponent - 1 if mantissa == 0.5 else exponent
    else:
        mantissa, exponent = math.frexp(value)
        rounds_up = rule is ScaleRule.EVEN and 2 * mantissa >= 2 - 2.0 ** -(element.mantissa_bits + 1)
        log2_scale = exponent - 1 + int(rounds_up) - element.emax
    return min(max(log2_scale + 127, 0), 254)


# --- amax and expand ---------------------------------------------------------------------------------------------


@each_granularity
@each_shape
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_amax_is_the_exact_maximum_of_every_block(
    granularity: Granularity, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    w = gaussian(*shape).to(dtype)
    grid = amax(w, granularity)
    assert grid.dtype == torch.float32
    assert tuple(grid.shape) == granularity.scale_shape(shape)
    for position, block in blocks_of(shape, granularity):
        assert float(grid[position]) == max(abs(v) for v in w[block].flatten().tolist())


def test_amax_of_zeros_of_either_sign_is_plus_zero() -> None:
    grid = amax(torch.full((1, 32), -0.0), GROUP_32)
    assert grid.view(torch.int32).tolist() == [[0]]


def test_amax_of_a_block_with_nan_or_infinity_is_nan_or_infinity() -> None:
    w = torch.ones(3, 32)
    w[0, 7], w[1, 31] = math.nan, -math.inf
    assert [str(v) for v in amax(w, GROUP_32).flatten().tolist()] == ["nan", "inf", "1.0"]
    assert math.isnan(float(amax(w, TENSOR)))


def test_amax_keeps_subnormals() -> None:
    w = torch.tensor([[BFLOAT16.min_positive, -3 * BFLOAT16.min_positive]], dtype=torch.bfloat16)
    assert float(amax(w, CHANNEL)) == 3 * BFLOAT16.min_positive


def test_amax_refuses_a_tensor_that_is_not_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"\[N, K\], got the shape \(2, 3, 4\)"):
        amax(torch.ones(2, 3, 4), CHANNEL)


def test_amax_of_a_matrix_without_rows_is_an_empty_grid() -> None:
    assert tuple(amax(torch.ones(0, 40), GROUP_32).shape) == (0, 2)


@each_granularity
@each_shape
def test_expand_gives_every_element_the_scale_of_its_block(granularity: Granularity, shape: tuple[int, int]) -> None:
    rows, cols = granularity.scale_shape(shape)
    grid = torch.arange(rows * cols, dtype=torch.float32).view(rows, cols)
    full = torch.full(shape, math.nan)
    full.copy_(expand(grid, granularity, shape))
    for position, block in blocks_of(shape, granularity):
        assert bool((full[block] == grid[position]).all())


def test_expand_keeps_the_dtype_of_codes() -> None:
    assert expand(torch.zeros(2, 1, dtype=torch.uint8), CHANNEL, (2, 3)).dtype == torch.uint8


def test_expand_refuses_a_grid_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"block 128x128 scales of \(129, 128\) have the shape \(2, 1\), got \(1, 1\)"):
        expand(torch.ones(1, 1), BLOCK_128, (129, 128))


# --- float32 scales and NVFP4 ------------------------------------------------------------------------------------


@each_mx_element
def test_float_scales_are_the_ieee_quotient(element: ElementFormat) -> None:
    grid = torch.cat([gaussian(1000).abs(), float32(448.0, 6.0, FLOAT32.max, 1e-30)])
    expected = grid.numpy() / np.float32(element.max)
    np.testing.assert_array_equal(float_scales(grid, element).numpy(), expected)


def test_a_block_of_zeros_gets_the_machine_epsilon() -> None:
    assert float_scales(float32(0.0, -0.0), E4M3).tolist() == [2.0**-23, 2.0**-23]


def test_a_scale_is_never_subnormal() -> None:
    tiny = float32(FLOAT32.min_positive, FLOAT32.min_normal, BFLOAT16.min_positive, 447 * FLOAT32.min_normal)
    assert float_scales(tiny, E4M3).tolist() == [FLOAT32.min_normal] * 4


def test_float_scales_of_a_non_finite_amax_are_not_finite() -> None:
    assert [str(v) for v in float_scales(float32(math.nan, math.inf), E4M3).tolist()] == ["nan", "inf"]


def test_the_nvfp4_divisor_has_no_dimensions() -> None:
    assert global_divisor(float32(2688.0)).shape == ()


@pytest.mark.parametrize("value", [0.0, FLOAT32.min_positive, FLOAT32.min_normal, 7e-36, math.nan])
def test_the_nvfp4_divisor_is_one_if_the_quotient_is_not_finite(value: float) -> None:
    assert float(global_divisor(float32(value))) == 1.0


def test_the_nvfp4_divisor_of_an_empty_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="amax of one tensor"):
        choose_scales(torch.ones(0, 16), SCHEMES["nvfp4"].weight)


def test_nvfp4_scales_divide_before_they_multiply() -> None:
    values = np.array(E4M3.values[: E4M3.max_code + 1], dtype=np.float32)
    divisor = np.float32(4321.7)
    centres = (values[1:] + values[:-1]) / 2 / divisor * np.float32(6)
    grid = np.concatenate([centres, np.nextafter(centres, np.float32(1)), np.nextafter(centres, np.float32(0))])
    exact, swapped = divisor * (grid / np.float32(6)), (divisor * grid) / np.float32(6)
    codes = [x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8) for x in (exact, swapped)]
    assert np.any(codes[0] != codes[1])
    found = nvfp4_scales(torch.from_numpy(grid), torch.tensor(divisor))
    np.testing.assert_array_equal(found.numpy(), np.maximum(codes[0], 1))


def test_nvfp4_scales_of_zeros_tiny_and_huge_blocks() -> None:
    codes = nvfp4_scales(float32(0.0, 1e-20, FLOAT32.min_positive, FLOAT32.max), torch.tensor(1.0))
    assert decode(codes, E4M3).tolist() == [0.125, 2.0**-9, 2.0**-9, 448.0]


# --- E8M0 by rule ------------------------------------------------------------------------------------------------


@each_mx_element
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.EVEN], ids=lambda r: r.value)
def test_floor_and_even_agree_with_frexp_in_every_binade_and_in_the_subnormals(
    element: ElementFormat, rule: ScaleRule
) -> None:
    grid = interesting_amax(element)
    expected = [exact_e8m0(value, element, rule) for value in grid.tolist()]
    assert e8m0_scales(grid, element, rule).tolist() == expected


@each_mx_element
def test_rceil_agrees_with_frexp_wherever_the_quotient_is_normal(element: ElementFormat) -> None:
    grid = interesting_amax(element)
    grid = grid[grid / element.max >= FLOAT32.min_normal]
    expected = [exact_e8m0(value, element, ScaleRule.RCEIL) for value in grid.tolist()]
    assert e8m0_scales(grid, element, ScaleRule.RCEIL).tolist() == expected


@each_mx_element
def test_rceil_of_a_subnormal_quotient_is_code_1_and_clips_nothing(element: ElementFormat) -> None:
    grid = interesting_amax(element)
    quotient = grid / element.max
    grid = grid[(quotient > 0) & (quotient < FLOAT32.min_normal)]
    assert grid.numel() > 100
    assert set(e8m0_scales(grid, element, ScaleRule.RCEIL).tolist()) == {1}
    assert max(exact_e8m0(value, element, ScaleRule.RCEIL) for value in grid.tolist()) == 1


def test_even_adds_one_from_the_mantissa_that_the_element_would_round_up() -> None:
    below = float(np.nextafter(np.float32(7), np.float32(0)))
    assert e8m0_scales(float32(4.0, below, 7.0), E2M1, ScaleRule.EVEN).tolist() == [127, 127, 128]
    below = float(np.nextafter(np.float32(496), np.float32(0)))
    assert e8m0_scales(float32(256.0, below, 496.0), E4M3, ScaleRule.EVEN).tolist() == [127, 127, 128]


def test_rceil_changes_right_after_the_largest_value() -> None:
    above = float(np.nextafter(np.float32(448), np.float32(500)))
    assert e8m0_scales(float32(224.0, 448.0, above), E4M3, ScaleRule.RCEIL).tolist() == [126, 127, 128]


@pytest.mark.parametrize("rule", MX_RULES, ids=lambda r: r.value)
def test_a_block_of_zeros_gets_code_0_and_the_largest_float32_stays_below_nan(rule: ScaleRule) -> None:
    codes = e8m0_scales(float32(0.0, FLOAT32.max, math.inf, math.nan), E2M1, rule).tolist()
    assert codes[0] == 0
    assert max(codes) <= 254


@pytest.mark.parametrize("rule", [ScaleRule.AMAX, ScaleRule.SEARCH], ids=lambda r: r.value)
def test_rules_without_a_formula_for_amax_are_refused(rule: ScaleRule) -> None:
    with pytest.raises(ValueError, match="use FLOOR, EVEN or RCEIL"):
        e8m0_scales(float32(1.0), E2M1, rule)


# --- search ------------------------------------------------------------------------------------------------------


def search_blocks() -> torch.Tensor:
    """Return groups of 32 over many binades: Gaussian, heavy-tailed, an outlier, half steps, ties, zeros."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(160, 32, generator=generator)
    heavy = torch.randn(80, 32, generator=generator) ** 3
    outlier = torch.randn(40, 32, generator=generator) * 0.01
    outlier[:, 5] = 10.0
    coarse = (torch.randn(80, 32, generator=generator) * 4).round() / 4
    lonely = torch.full((40, 32), 0.25) + torch.randn(40, 32, generator=generator) * 0.03
    lonely[:, 9] = torch.linspace(4, 5, 40)
    constants = torch.tensor([6.0, 7.0, 5.0, 4.5, 1.0, 0.0, -0.0, 448.0])[:, None].expand(-1, 32)
    blocks = torch.cat([plain, heavy, outlier, coarse, lonely, constants])
    exponents = torch.randint(-100, 100, (len(blocks), 1), generator=generator)
    return torch.cat([blocks, torch.ldexp(blocks, exponents)])


def near_ties(count: int) -> torch.Tensor:
    """Return E2M1 groups whose errors with offsets 0 and +1 differ only by the roundings of the sum.

    With offset +1 the error of one element just above 7 shrinks by as much as the errors of the others, close to 0.25,
    grow.
    """
    generator = torch.Generator().manual_seed(2)
    w = 0.25 + torch.rand(count, 32, generator=generator, dtype=torch.float64) * 0.02
    w[:, 1:] *= torch.sign(torch.randn(count, 31, generator=generator))
    w[:, 0] = 7 + (w[:, 1:].abs() - 0.25).sum(dim=1) / 4
    order = torch.rand(count, 32, generator=generator).argsort(dim=1)
    return w.gather(1, order).float()


def tree_sum(errors: list[np.float32]) -> np.float32:
    for half in (16, 8, 4, 2, 1):
        errors = [errors[i] + errors[i + half] for i in range(half)]
    return errors[0]


def sum_in_sequence(errors: list[np.float32]) -> np.float32:
    return functools.reduce(lambda total, error: total + error, errors)


def search_in_stated_order(
    w: np.ndarray, element: ElementFormat, add: Callable[[list[np.float32]], np.float32] = tree_sum
) -> int:
    """Repeat the search in the documented order, one float32 operation at a time, with numpy and a table of values."""
    values = np.array([element.decode(code) for code in range(element.max_code + 1)])
    midpoints = (values[1:] + values[:-1]) / 2
    floor = exact_e8m0(float(np.abs(w).max()), element, ScaleRule.FLOOR) if np.any(w) else 0
    best, best_error = None, None
    for offset in (0, 1, -1):
        if floor + offset < 0:
            continue
        y = np.ldexp(w, 127 - floor)
        z = np.ldexp(y, -offset)
        index = np.searchsorted(midpoints, np.abs(z), side="left")
        tie = (index < len(midpoints)) & (np.abs(z) == midpoints[np.minimum(index, len(midpoints) - 1)])
        index = np.where(tie & (index % 2 == 1), index + 1, index)
        q = np.copysign(values[index], z).astype(np.float32)
        d = y - np.ldexp(q, offset)
        error = add(list(d * d))
        if best_error is None or error < best_error:
            best, best_error = floor + offset, error
    assert best is not None
    return best


def errors_in_float64(blocks: torch.Tensor, codes: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Return the squared error of every group for its E8M0 code."""
    scale = torch.ldexp(torch.ones(len(codes), dtype=torch.float64), codes.int() - 127)[:, None]
    q = decode(encode((blocks.double() / scale).float(), element), element).double() * scale
    return (blocks.double() - q).square().sum(dim=1)


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda f: f.name)
def test_the_search_finds_the_best_of_all_powers_of_two(element: ElementFormat) -> None:
    blocks = search_blocks()
    found = search_e8m0_scales(blocks, GROUP_32, element).flatten()
    floors = e8m0_scales(amax(blocks, GROUP_32), element, ScaleRule.FLOOR).flatten().int()
    errors = errors_in_float64(blocks, found, element)
    for offset in range(-6, 5):
        others = errors_in_float64(blocks, (floors + offset).clamp(0, 254), element)
        assert bool((errors <= others * (1 + 1e-5)).all())


@pytest.mark.parametrize("element", [E2M1, E4M3], ids=lambda f: f.name)
def test_the_search_equals_the_documented_order_of_operations_bit_for_bit(element: ElementFormat) -> None:
    blocks = search_blocks()
    expected = [search_in_stated_order(block, element) for block in blocks.numpy()]
    assert search_e8m0_scales(blocks, GROUP_32, element).flatten().tolist() == expected


def test_the_search_adds_in_the_documented_order() -> None:
    blocks = near_ties(300)
    expected = [search_in_stated_order(block, E2M1) for block in blocks.numpy()]
    in_sequence = [search_in_stated_order(block, E2M1, add=sum_in_sequence) for block in blocks.numpy()]
    assert sum(a != b for a, b in zip(expected, in_sequence, strict=True)) > 10
    assert search_e8m0_scales(blocks, GROUP_32, E2M1).flatten().tolist() == expected


def test_every_offset_is_chosen_by_some_block() -> None:
    blocks = search_blocks()
    floors = e8m0_scales(amax(blocks, GROUP_32), E2M1, ScaleRule.FLOOR).int()
    assert set((search_e8m0_scales(blocks, GROUP_32, E2M1) - floors).flatten().tolist()) == set(SEARCH_OFFSETS)


def test_the_search_gives_valid_codes_at_the_ends_of_float32() -> None:
    subnormals = gaussian(16, 32).abs() * 100 * FLOAT32.min_positive
    assert search_e8m0_scales(subnormals, GROUP_32, E2M1).max() <= 1
    huge = gaussian(16, 32).clamp(-1, 1) * FLOAT32.max
    codes = search_e8m0_scales(huge, GROUP_32, E2M1)
    assert int(codes.max()) <= 254
    assert int(codes.min()) >= 249


def test_the_search_skips_codes_below_zero() -> None:
    block = torch.full((1, 32), 0.25)
    block[0, 0] = 4.0  # the best code would be one below FLOOR's
    codes = [search_e8m0_scales(torch.ldexp(block, torch.tensor(k)), GROUP_32, E2M1) for k in (-125, -126, -127)]
    assert [int(code) for code in codes] == [1, 0, 0]


def test_a_partial_group_has_the_code_of_the_group_padded_with_zeros() -> None:
    w = gaussian(50, 40)
    padded = torch.nn.functional.pad(w, (0, 24))
    assert torch.equal(search_e8m0_scales(w, GROUP_32, E2M1), search_e8m0_scales(padded, GROUP_32, E2M1))


def test_bfloat16_weights_give_the_codes_of_the_same_float32_weights() -> None:
    w = gaussian(50, 64).bfloat16()
    assert torch.equal(search_e8m0_scales(w, GROUP_32, E2M1), search_e8m0_scales(w.float(), GROUP_32, E2M1))


@pytest.mark.parametrize("granularity", [TENSOR, CHANNEL, BLOCK_128, Granularity("group 1x24", 1, 24)], ids=str)
def test_the_search_refuses_blocks_that_it_cannot_sum_as_a_tree(granularity: Granularity) -> None:
    with pytest.raises(ValueError, match="one row and a power of two of columns"):
        search_e8m0_scales(torch.ones(2, 48), granularity, E2M1)


# --- choose_scales, effective_scale ------------------------------------------------------------------------------


@each_scheme
@each_shape
def test_the_grid_has_the_shape_and_dtype_of_the_scheme(spec: WeightSpec, shape: tuple[int, int]) -> None:
    scale, divisor = choose_scales(gaussian(*shape), spec)
    assert tuple(scale.shape) == spec.granularity.scale_shape(shape)
    assert scale.dtype == (torch.float32 if spec.scale is FLOAT32 else torch.uint8)
    assert (divisor is not None) == spec.has_global_scale


@each_scheme
def test_row_slabs_with_the_amax_of_the_tensor_give_the_scales_of_the_tensor(spec: WeightSpec) -> None:
    w = gaussian(300, 96)
    whole, divisor = choose_scales(w, spec)
    shared = amax(w, TENSOR)
    slabs = [choose_scales(w[start : start + 128], spec, shared) for start in range(0, 300, 128)]
    assert all(slab_divisor == divisor for _, slab_divisor in slabs)
    if spec.granularity == TENSOR:
        assert all(torch.equal(slab, whole) for slab, _ in slabs)
    else:
        assert torch.equal(torch.cat([slab for slab, _ in slabs]), whole)


def test_a_shared_amax_replaces_the_amax_of_the_tensor() -> None:
    w = torch.ones(16, 16)
    scale, _ = choose_scales(w, SCHEMES["fp8-static"].weight, torch.tensor(4480.0))
    assert scale.tolist() == [[10.0]]
    _, divisor = choose_scales(w, SCHEMES["nvfp4"].weight, torch.tensor(2688.0))
    assert divisor is not None
    assert float(divisor) == 1.0


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if not s.weight.needs_tensor_amax])
def test_schemes_without_a_tensor_amax_ignore_a_shared_amax(name: str) -> None:
    w, spec = gaussian(4, 64), SCHEMES[name].weight
    assert torch.equal(choose_scales(w, spec, torch.tensor(1e6))[0], choose_scales(w, spec)[0])


@pytest.mark.parametrize("rule", MX_RULES, ids=lambda r: r.value)
def test_scales_are_chosen_by_the_rule_of_the_spec(rule: ScaleRule) -> None:
    w = gaussian(64, 64)
    scale, divisor = choose_scales(w, WeightSpec(E4M3, GROUP_32, E8M0, rule))
    assert divisor is None
    assert torch.equal(scale, e8m0_scales(amax(w, GROUP_32), E4M3, rule))


@pytest.mark.parametrize(
    "spec",
    [
        WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.AMAX),
        WeightSpec(E4M3, CHANNEL, FLOAT32, ScaleRule.FLOOR),
        WeightSpec(E4M3, CHANNEL, FLOAT32, ScaleRule.SEARCH),
        WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.FLOOR),
        WeightSpec(E4M3, CHANNEL, BFLOAT16, ScaleRule.AMAX),
    ],
    ids=lambda s: f"{s.scale.name}-{s.rule.value}",
)
def test_a_rule_that_does_not_fit_the_scale_format_is_refused(spec: WeightSpec) -> None:
    with pytest.raises(ValueError, match=spec.rule.name):
        choose_scales(torch.ones(2, 32), spec)


def test_effective_e8m0_scales_are_exact_powers_of_two_down_to_the_subnormal() -> None:
    codes = torch.arange(255, dtype=torch.int32).to(torch.uint8).view(1, 255)
    values = effective_scale(codes, SCHEMES["mxfp4"].weight)
    assert values.dtype == torch.float32
    assert values.flatten().tolist() == [math.ldexp(1.0, code - 127) for code in range(255)]


def test_effective_nvfp4_scales_are_divided_by_the_divisor() -> None:
    codes, divisor = torch.arange(1, 127, dtype=torch.uint8).view(1, -1), torch.tensor(2688.0 / 3.3)
    expected = decode(codes, E4M3).numpy() / divisor.numpy()
    np.testing.assert_array_equal(effective_scale(codes, SCHEMES["nvfp4"].weight, divisor).numpy(), expected)


def test_a_missing_or_unwanted_divisor_is_refused() -> None:
    codes = torch.ones(1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="E4M3 scales need a divisor"):
        effective_scale(codes, SCHEMES["nvfp4"].weight)
    with pytest.raises(ValueError, match="E8M0 scales take no divisor"):
        effective_scale(codes, SCHEMES["mxfp4"].weight, torch.tensor(1.0))


# --- the whole cast ----------------------------------------------------------------------------------------------


def cast(w: torch.Tensor, spec: WeightSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, effective scales and the dequantized weight."""
    scale, divisor = choose_scales(w, spec)
    factor = effective_scale(scale, spec, divisor)
    shape = (w.shape[0], w.shape[1])
    full = expand(factor, spec.granularity, shape)
    codes = encode(w.float() / full, spec.element)
    return codes, factor, decode(codes, spec.element) * full


def sqnr(w: torch.Tensor, spec: WeightSpec) -> float:
    codes, factor, _ = cast(w, spec)
    return cast_stats(w, codes, factor, spec).sqnr_db


@each_scheme
def test_a_block_of_zeros_decodes_to_zeros(spec: WeightSpec) -> None:
    w = gaussian(256, 256)
    w[:128, :128] = 0.0
    w[5, :64] = -0.0
    _, _, dequantized = cast(w, spec)
    assert bool((dequantized[:128, :128] == 0).all())
    assert bool(torch.signbit(dequantized[5, :64]).all())


@each_scheme
@pytest.mark.parametrize("magnitude", [FLOAT32.min_positive, 1e-41, 1e-38, 1e-35, 1e-20, 1e20, 1e38], ids=str)
def test_scales_stay_positive_and_finite_at_any_magnitude(spec: WeightSpec, magnitude: float) -> None:
    w = gaussian(8, 64).clamp(-3, 3) * magnitude
    _, factor, dequantized = cast(w, spec)
    assert bool((factor > 0).all())
    assert bool(factor.isfinite().all())
    assert bool(dequantized.isfinite().all())


def test_448_exactly_is_stored_as_448_with_scale_1() -> None:
    codes, factor, dequantized = cast(float32(448.0, -448.0, 1.0).view(1, 3), SCHEMES["fp8"].weight)
    assert factor.tolist() == [[1.0]]
    assert codes.tolist() == [[0x7E, 0xFE, 0x38]]
    assert dequantized.tolist() == [[448.0, -448.0, 1.0]]


def test_nan_in_a_weight_dequantizes_to_nan() -> None:
    w = gaussian(2, 64)
    w[0, 3] = math.nan
    dequantized = cast(w, SCHEMES["fp8"].weight)[2]
    assert bool(dequantized[0].isnan().all())
    assert bool(dequantized[1].isfinite().all())
    with pytest.raises(ValueError, match="E2M1 cannot hold NaN"):
        cast(w, SCHEMES["mxfp4"].weight)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.FLOOR), 18.74),
        (WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.EVEN), 18.99),
        (WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.RCEIL), 18.65),
        (WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.SEARCH), 19.02),
        (WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.FLOOR), 30.49),
        (WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.EVEN), 31.06),
        (WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.RCEIL), 31.53),
        (WeightSpec(E4M3, TENSOR), 31.55),
        (WeightSpec(E4M3, CHANNEL), 31.56),
        (WeightSpec(E4M3, BLOCK_128), 31.57),
        (WeightSpec(E5M2, CHANNEL), 25.6),
        (WeightSpec(E2M1, GROUP_16, E4M3), 20.42),
        (WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.SEARCH), 21.78),
    ],
    ids=lambda v: f"{v.element.name}-{v.granularity}-{v.rule.value}" if isinstance(v, WeightSpec) else str(v),
)
def test_sqnr_of_gaussian_weights_has_the_known_value(spec: WeightSpec, expected: float) -> None:
    # With power-of-two scales, SQNR depends on the position of sigma between powers of two; known values are means.
    measured = [sqnr(gaussian(256, 1024) * 2.0 ** (-6 + phase / 4), spec) for phase in range(4)]
    assert sum(measured) / len(measured) == pytest.approx(expected, abs=0.03)


# --- cast_stats --------------------------------------------------------------------------------------------------


def stats_at_scale_one(values: list[float], element: ElementFormat) -> CastStats:
    w = float32(*values).view(1, -1)
    return cast_stats(w, encode(w, element), torch.ones(1, 1), WeightSpec(element, CHANNEL))


def test_the_statistics_of_a_small_cast_have_the_values_computed_by_hand() -> None:
    stats = stats_at_scale_one([0.0, 0.2, 1.0, 2.75, -10.0], E2M1)  # -> 0, 0, 1, 3, -6
    assert stats.elements == 5
    assert stats.signal == pytest.approx(0.04 + 1 + 7.5625 + 100)
    assert stats.noise == pytest.approx(0.04 + 0.0625 + 16)
    assert (stats.saturated, stats.flushed) == (1, 1)


@pytest.mark.parametrize(("element", "edge"), [(E4M3, 464.0), (E2M1, 7.0), (E5M2, 61440.0)], ids=lambda v: str(v))
def test_saturation_starts_half_a_step_beyond_the_largest_value(element: ElementFormat, edge: float) -> None:
    beyond = float(np.nextafter(np.float32(edge), np.float32(np.inf)))
    assert stats_at_scale_one([element.max, -edge, edge], element).saturated == 0
    assert stats_at_scale_one([element.max, -beyond, beyond], element).saturated == 2


def test_flushed_counts_nonzero_values_that_became_zero() -> None:
    tie = E4M3.min_positive / 2
    above = float(np.nextafter(np.float32(tie), np.float32(1)))
    assert stats_at_scale_one([0.0, -0.0, tie, -tie, above, FLOAT32.min_positive], E4M3).flushed == 3


@each_scheme
def test_the_noise_is_the_distance_to_the_dequantized_weight(spec: WeightSpec) -> None:
    w = gaussian(130, 96)
    codes, factor, dequantized = cast(w, spec)
    stats = cast_stats(w, codes, factor, spec)
    error = w.numpy().astype(np.float64) - dequantized.numpy().astype(np.float64)
    assert stats.noise == pytest.approx(float((error**2).sum()), rel=1e-12)
    assert stats.signal == pytest.approx(float((w.numpy().astype(np.float64) ** 2).sum()), rel=1e-12)


def test_statistics_of_row_slabs_add_up_to_those_of_the_whole() -> None:
    spec, w = SCHEMES["mxfp4"].weight, gaussian(96, 64)
    codes, factor, _ = cast(w, spec)
    parts = [cast_stats(w[i:j], codes[i:j], factor[i:j], spec) for i, j in itertools.pairwise((0, 32, 96))]
    total, whole = sum(parts, CastStats()), cast_stats(w, codes, factor, spec)
    assert (total.elements, total.saturated, total.flushed) == (whole.elements, whole.saturated, whole.flushed)
    assert total.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-9)


def test_statistics_of_an_empty_weight_are_neutral() -> None:
    empty, codes = torch.ones(0, 64), torch.ones(0, 64, dtype=torch.uint8)
    assert cast_stats(empty, codes, torch.ones(0, 2), WeightSpec(E4M3, GROUP_32)) == CastStats()
