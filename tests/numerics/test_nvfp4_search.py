"""Tests of the search for NVFP4's block scales against numpy in the documented order and against brute force."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, TENSOR, Granularity
from minifloat.numerics.scale import choose_scales, effective_scale
from minifloat.numerics.scale_rules import (
    NVFP4_SEARCH_OFFSETS,
    amax,
    expand,
    global_divisor,
    nvfp4_scales,
    search_nvfp4_scales,
)
from minifloat.numerics.scheme import ScaleRule, WeightSpec

NVFP4 = WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.SEARCH)
SCALES = np.array(E4M3.values[: E4M3.max_code + 1])
ELEMENTS = np.array([E2M1.decode(code) for code in range(E2M1.max_code + 1)])

Grid = npt.NDArray[np.int64]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_blocks() -> torch.Tensor:
    """Return blocks like those of weights: normal and heavier tails."""
    return torch.cat([gaussian(6000, 16), gaussian(3000, 16, seed=1) ** 3, gaussian(3000, 16, seed=2).abs().sqrt()])


def adversarial_blocks() -> torch.Tensor:
    """Return blocks of few distinct values, midpoints, one or two outliers, constants, and magnitudes far apart."""
    generator = torch.Generator().manual_seed(3)
    pick = torch.randint(0, len(ELEMENTS), (3000, 16), generator=generator)
    exact = torch.from_numpy(ELEMENTS).float()[pick] * (1 + torch.rand(3000, 1, generator=generator))
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    halves = midpoints[torch.randint(0, 8, (3000, 16), generator=generator)]
    outlier = torch.rand(1000, 16, generator=generator) * 0.3
    outlier[:, 3] = 6.0
    plateau = torch.full((1000, 16), 5.0) + torch.rand(1000, 16, generator=generator)
    plateau[:, :2] = 6.0
    constant = torch.rand(200, 1, generator=generator).expand(-1, 16)
    binades = torch.ldexp(gaussian(2000, 16, seed=4), torch.randint(-22, 1, (2000, 1), generator=generator))
    return torch.cat([exact, halves, outlier, plateau, constant, binades])


def chosen(blocks: torch.Tensor) -> tuple[Grid, Grid, np.float32]:
    """Return the codes of the search, the codes of amax, and the divisor."""
    divisor = global_divisor(amax(blocks, TENSOR))
    first = nvfp4_scales(amax(blocks, GROUP_16), divisor)
    found = search_nvfp4_scales(blocks, GROUP_16, divisor)
    return found.flatten().numpy().astype(int), first.flatten().numpy().astype(int), divisor.numpy()


def errors_in_float64(blocks: torch.Tensor, divisor: np.float32, codes: Grid) -> npt.NDArray[np.float64]:
    """Return the squared error of every block for its code by the nearest value of E2M1, in units of the divisor."""
    scaled = np.abs(blocks.numpy().astype(np.float64)) * float(divisor) / SCALES[codes][:, None]
    nearest = np.abs(scaled[:, :, None] - ELEMENTS).min(axis=2)
    error: npt.NDArray[np.float64] = (nearest**2).sum(axis=1) * SCALES[codes] ** 2
    return error


def best_of_all_codes(blocks: torch.Tensor, divisor: np.float32) -> npt.NDArray[np.float64]:
    codes = range(1, E4M3.max_code + 1)
    return np.min([errors_in_float64(blocks, divisor, np.full(len(blocks), code)) for code in codes], axis=0)


def search_in_stated_order(block: npt.NDArray[np.float32], first: int, divisor: np.float32) -> int:
    """Repeat the search in the documented order, one float32 operation at a time, with a table of values."""
    midpoints = (ELEMENTS[1:] + ELEMENTS[:-1]) / 2
    x = block * divisor
    best, best_error = first, None
    for offset in (0, 1, -1, 2, -2, 3, 4, 5, 6):
        code = min(max(first + offset, 1), 0x7E)
        value = np.float32(SCALES[code])
        y = x * (np.float32(1) / value)
        index = np.searchsorted(midpoints, np.abs(y), side="left")
        tie = (index < len(midpoints)) & (np.abs(y) == midpoints[np.minimum(index, len(midpoints) - 1)])
        index = np.where(tie & (index % 2 == 1), index + 1, index)
        d = y - np.copysign(ELEMENTS[index], y).astype(np.float32)
        total = d * d
        for half in (8, 4, 2, 1):
            total = total[:half] + total[half : 2 * half]
        error = total[0] * (value * value)
        if best_error is None or error < best_error:
            best, best_error = code, error
    return best


@pytest.mark.parametrize("blocks", [random_blocks(), adversarial_blocks()], ids=["random", "adversarial"])
def test_the_search_equals_the_documented_order_of_operations_bit_for_bit(blocks: torch.Tensor) -> None:
    blocks = blocks[::3]
    found, first, divisor = chosen(blocks)
    rows = zip(blocks.numpy(), first.tolist(), strict=True)
    assert found.tolist() == [search_in_stated_order(block, code, divisor) for block, code in rows]


@pytest.mark.parametrize("blocks", [random_blocks(), adversarial_blocks()], ids=["random", "adversarial"])
def test_the_search_finds_the_best_code_of_its_list(blocks: torch.Tensor) -> None:
    found, first, divisor = chosen(blocks)
    errors = errors_in_float64(blocks, divisor, found)
    codes = (np.clip(first + offset, 1, E4M3.max_code) for offset in NVFP4_SEARCH_OFFSETS)
    best = np.min([errors_in_float64(blocks, divisor, code) for code in codes], axis=0)
    assert np.all(errors <= best * (1 + 1e-5) + 1e-9)


def test_the_search_rarely_misses_the_best_of_all_codes_and_by_little() -> None:
    blocks = random_blocks()
    found, _, divisor = chosen(blocks)
    errors, best = errors_in_float64(blocks, divisor, found), best_of_all_codes(blocks, divisor)
    missed = errors > best * (1 + 1e-5) + 1e-9
    assert missed.mean() < 0.001
    assert errors.sum() < best.sum() * 1.0001


def test_offsets_of_eight_and_more_never_win_among_normal_codes() -> None:
    blocks = torch.cat([random_blocks(), adversarial_blocks()])
    _, first, divisor = chosen(blocks)
    normal = first >= 1 << E4M3.mantissa_bits
    for offset in range(8, 25):
        far = np.minimum(first + offset, E4M3.max_code)
        near = np.minimum(far - 8, first + offset - 8)
        worse = errors_in_float64(blocks, divisor, near) <= errors_in_float64(blocks, divisor, far) * (1 + 1e-9)
        assert np.all(worse[normal & (first + offset <= E4M3.max_code)])


def test_every_offset_is_chosen_by_some_block() -> None:
    found, first, _ = chosen(torch.cat([random_blocks(), torch.full((1, 16), 100.0)]))
    assert set((found - first).tolist()) == set(NVFP4_SEARCH_OFFSETS)


def test_the_error_is_never_above_that_of_amax_and_a_quarter_lower_on_normal_weights() -> None:
    blocks = gaussian(20000, 16)
    found, first, divisor = chosen(blocks)
    searched, of_amax = errors_in_float64(blocks, divisor, found), errors_in_float64(blocks, divisor, first)
    assert np.all(searched <= of_amax * (1 + 1e-5) + 1e-9)
    assert searched.sum() / of_amax.sum() == pytest.approx(0.73, abs=0.01)


def test_equal_errors_keep_the_code_of_amax() -> None:
    block = torch.zeros(2, 16)
    block[0, 3] = 6.0
    block[1, :8] = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0])
    found, first, _ = chosen(block)
    assert found.tolist() == first.tolist()


def test_four_over_six_is_chosen_where_it_is_exact() -> None:
    block = torch.tensor([[6.0] + [0.0] * 15, [2.0, 3.0, 3.0, 4.0] + [0.0] * 12]) * 448
    block[0] *= 4
    found, first, _ = chosen(block)
    assert SCALES[found[1]] / SCALES[first[1]] == pytest.approx(1.5, rel=0.07)
    assert errors_in_float64(block, np.float32(1 / 4), found)[1] == 0.0


def test_the_search_stays_within_the_codes_of_positive_finite_numbers() -> None:
    largest = E4M3.max * E2M1.max / 2.0**9  # the divisor is 2**9, so that its block has the largest scale
    blocks = torch.cat([torch.full((1, 16), largest), gaussian(64, 16).clamp(-1, 1) * largest, gaussian(64, 16) * 1e-7])
    blocks[1:65, 0] = largest
    found, first, _ = chosen(blocks)
    assert first.max() == E4M3.max_code
    assert first.min() == 1
    assert found.max() == E4M3.max_code
    assert found.min() == 1


def test_blocks_of_zeros_and_tensors_of_zeros_get_the_machine_epsilon() -> None:
    w = torch.cat([torch.zeros(1, 16), -torch.zeros(1, 16), torch.ones(1, 16)])
    codes = search_nvfp4_scales(w, GROUP_16, global_divisor(amax(w, TENSOR)))
    assert decode(codes, E4M3)[:2].flatten().tolist() == [0.125, 0.125]
    codes = search_nvfp4_scales(w[:2], GROUP_16, global_divisor(amax(w[:2], TENSOR)))
    assert decode(codes, E4M3).flatten().tolist() == [0.125, 0.125]


@pytest.mark.parametrize("exponent", [-140, -110, 0, 100, 126])
def test_the_search_gives_valid_codes_at_the_ends_of_float32(exponent: int) -> None:
    w = torch.ldexp(gaussian(16, 32).clamp(-1.9, 1.9), torch.tensor(exponent))
    codes, divisor = choose_scales(w, NVFP4)
    assert int(codes.min()) >= 1
    assert int(codes.max()) <= E4M3.max_code
    assert bool(effective_scale(codes, NVFP4, divisor).isfinite().all())


def test_an_amax_that_is_too_small_or_too_large_does_not_raise() -> None:
    for tensor_amax in (0.0, FLOAT32.min_normal, 1e-35, 1e30):
        codes, _ = choose_scales(gaussian(4, 64), NVFP4, torch.tensor(tensor_amax))
        assert 1 <= int(codes.min()) <= int(codes.max()) <= E4M3.max_code


def test_a_partial_group_has_the_code_of_the_group_padded_with_zeros() -> None:
    w = gaussian(50, 40)
    padded = torch.nn.functional.pad(w, (0, 8))
    divisor = global_divisor(amax(w, TENSOR))
    assert torch.equal(search_nvfp4_scales(w, GROUP_16, divisor), search_nvfp4_scales(padded, GROUP_16, divisor))


def test_bfloat16_weights_give_the_codes_of_the_same_float32_weights() -> None:
    w = gaussian(50, 64).bfloat16()
    divisor = global_divisor(amax(w, TENSOR))
    assert torch.equal(search_nvfp4_scales(w, GROUP_16, divisor), search_nvfp4_scales(w.float(), GROUP_16, divisor))


@pytest.mark.parametrize("granularity", [TENSOR, CHANNEL, BLOCK_128, Granularity("group 1x24", 1, 24)], ids=str)
def test_the_search_refuses_blocks_that_it_cannot_sum_as_a_tree(granularity: Granularity) -> None:
    with pytest.raises(ValueError, match="one row and a power of two of columns"):
        search_nvfp4_scales(torch.ones(2, 48), granularity, torch.tensor(1.0))


def test_the_search_lowers_the_error_of_the_whole_cast() -> None:
    def noise(rule: ScaleRule) -> float:
        w, spec = gaussian(256, 1024), WeightSpec(E2M1, GROUP_16, E4M3, rule)
        scale, divisor = choose_scales(w, spec)
        full = expand(effective_scale(scale, spec, divisor), GROUP_16, (256, 1024))
        return float((w - decode(encode(w / full, E2M1), E2M1) * full).double().square().sum())

    assert noise(ScaleRule.SEARCH) / noise(ScaleRule.AMAX) == pytest.approx(0.73, abs=0.01)
