"""Every implementation of `quantize_rows` and `amax` against the torch reference, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import flushing_subnormals
from quantize_cases import (
    DTYPES,
    SEARCHES,
    SPECS,
    assert_amax_is_that_of_finite_elements,
    between_equally_good_scales,
    distinct,
    even_columns,
    every_binade,
    gaussian,
    quantize,
    raw,
    sixteen_bit_values,
    ties_and_neighbours,
)

from minifloat.kernels import native
from minifloat.kernels.quantize import amax, quantize_rows
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import E2M1, E4M3, E5M2, E8M0, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, GROUP_32, TENSOR, block_granularity
from minifloat.numerics.scheme import ScaleRule, WeightSpec

#: Sums of squares are kept in float32 lanes per chunk; counts and codes are exact.
STATS_RTOL = 1e-5

LIBRARY = native.load()
ISAS = () if LIBRARY is None else LIBRARY.isas
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native.why_unavailable())

SPECS = SPECS | {
    "e5m2-block-32x48": WeightSpec(E5M2, block_granularity(32, 48)),
    "e4m3-wide-blocks": WeightSpec(E4M3, block_granularity(3, 2048)),
    "e8m0-tensor": WeightSpec(E4M3, TENSOR, E8M0, ScaleRule.RCEIL),
    "e8m0-block": WeightSpec(E4M3, BLOCK_128, E8M0, ScaleRule.EVEN),
} | {
    f"E5M2-{rule.value}": WeightSpec(E5M2, GROUP_32, E8M0, rule)
    for rule in (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.SEARCH)
}  # fmt: skip
NAMES = distinct(SPECS)

#: All specs in BF16; the dtype only concerns how elements are read, so a few of them show it for the others.
DTYPES_AND_SPECS = [("BF16", name) for name in NAMES] + [
    (dtype, name) for dtype in ("F16", "F32") for name in ("fp8-block", "fp8", "fp8-static", "mxfp4", "nvfp4")
]

#: Rows and columns around the sizes of blocks (16, 32, 128) and of the kernel's chunks (1024) and panels (4096).
SHAPES = (
    (1, 1),
    (1, 16),
    (2, 30),
    (3, 33),
    (7, 100),
    (1, 1024),
    (2, 1025),
    (3, 2050),
    (3, 4500),
    (129, 127),
    (300, 513),
)


@contextmanager
def instruction_set(isa: str) -> Iterator[None]:
    """Calls go to that instruction set."""
    assert LIBRARY is not None
    library = LIBRARY.with_isa(isa)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: library)
        yield


def assert_matches_reference(
    w: torch.Tensor, spec: WeightSpec, tensor_amax: float | None = None, *, stats: bool = True
) -> None:
    """Bit for bit on every instruction set; `stats`: sums of squares, too, which overflow in the oracle's float32."""
    w = even_columns(w, spec)
    expected = quantize(w, spec, "reference", tensor_amax)
    for isa in ISAS:
        with instruction_set(isa):
            actual = quantize(w, spec, "cpu", tensor_amax)
        np.testing.assert_array_equal(actual.scales, expected.scales, isa)
        np.testing.assert_array_equal(actual.codes, expected.codes, isa)
        assert actual.nonfinite == expected.nonfinite, isa
        assert counts(actual.stats) == counts(expected.stats), isa
        if stats:
            assert actual.stats.signal == pytest.approx(expected.stats.signal, rel=STATS_RTOL, abs=0), isa
            assert actual.stats.noise == pytest.approx(expected.stats.noise, rel=STATS_RTOL, abs=0), isa


def counts(stats: CastStats) -> tuple[int, int, int]:
    return stats.elements, stats.saturated, stats.flushed


@pytest.mark.parametrize(("dtype", "name"), DTYPES_AND_SPECS)
def test_codes_scales_and_statistics_are_those_of_the_oracle_on_ragged_shapes(dtype: str, name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        assert_matches_reference(gaussian(shape, DTYPES[dtype], seed), SPECS[name])


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(NAMES)),
    dtype=st.sampled_from(sorted(DTYPES)),
    rows=st.integers(1, 300),
    cols=st.integers(1, 513),
    exponent=st.integers(-14, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_magnitude_matches_the_oracle(
    name: str, dtype: str, rows: int, cols: int, exponent: int, seed: int
) -> None:
    w = gaussian((rows, cols), torch.float32, seed) * 10.0**exponent
    assert_matches_reference(w.to(DTYPES[dtype]), SPECS[name])


@pytest.mark.parametrize(("dtype", "name"), [pair for pair in DTYPES_AND_SPECS if pair[0] != "F32"])
def test_every_sixteen_bit_value_matches_the_oracle(dtype: str, name: str) -> None:
    for order in sixteen_bit_values(DTYPES[dtype]):
        assert_matches_reference(order, SPECS[name], stats=False)


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
@pytest.mark.parametrize("scale", [1.0, 0.75, 1.0 / 3.0])
def test_ties_and_their_neighbours_round_as_in_the_oracle(element: ElementFormat, scale: float) -> None:
    w = ties_and_neighbours(element, scale)
    assert_matches_reference(w, WeightSpec(element, TENSOR), tensor_amax=element.max * scale, stats=False)


@pytest.mark.parametrize("name", NAMES)
def test_float32_of_every_binade_matches_the_oracle(name: str) -> None:
    for order in every_binade(130, 514):
        assert_matches_reference(order, SPECS[name], stats=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e-42, 1e-37, 1e-36, 1e-20, 1e20, 1e37])
def test_the_statistics_neither_overflow_nor_underflow(name: str, factor: float) -> None:
    assert_matches_reference(gaussian((40, 200)) * factor, SPECS[name])


@pytest.mark.parametrize("name", SEARCHES)
def test_the_search_decides_as_the_oracle_between_equally_good_scales(name: str) -> None:
    for w in between_equally_good_scales(SPECS[name], 4096):
        assert_matches_reference(w, SPECS[name])


@pytest.mark.parametrize("scale", [1.0, 1.125, 1.5, 1.875])
def test_the_search_of_nvfp4_measures_midpoints_and_their_neighbours_as_the_oracle(scale: float) -> None:
    """The quarters up to 8 and one ulp to either side, in blocks with scale codes from the smallest to the largest."""
    quarters = torch.arange(1, 33) / 4
    infinity = torch.tensor(torch.inf)
    near = torch.cat((quarters, torch.nextafter(quarters, infinity), torch.nextafter(quarters, -infinity))) * scale
    order = torch.randperm(near.numel(), generator=torch.Generator().manual_seed(0))
    w = torch.cat([near[order] * 2.0**-exponent for exponent in range(20)]).view(40, -1)
    assert_matches_reference(w, SPECS["nvfp4"])
    assert_matches_reference(w, SPECS["nvfp4"], tensor_amax=4.0)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_outliers_match_the_oracle(name: str) -> None:
    zeros = torch.zeros(130, 260, dtype=torch.bfloat16)
    half = gaussian((130, 260), torch.bfloat16)
    half[:, 128:] = 0
    outlier = gaussian((130, 260), torch.bfloat16)
    outlier[64, 130] = 3e4
    for w in (zeros, -zeros, half, outlier):
        assert_matches_reference(w, SPECS[name])


@pytest.mark.parametrize("name", [name for name in NAMES if SPECS[name].needs_tensor_amax])
@pytest.mark.parametrize("tensor_amax", [0.0, 1e-38, 1e-30, 1.0, 1e30])
def test_the_given_tensor_amax_is_used(name: str, tensor_amax: float) -> None:
    w = gaussian((5, 300), torch.bfloat16)
    assert_matches_reference(w, SPECS[name], tensor_amax=tensor_amax)


@pytest.mark.parametrize("name", NAMES)
def test_slabs_cut_at_block_rows_give_the_whole(name: str) -> None:
    spec, w = SPECS[name], gaussian((300, 514), torch.bfloat16)
    tensor_amax = float(w.abs().max())
    whole = quantize(w, spec, "cpu", tensor_amax)
    step = spec.granularity.rows or 77
    parts = [quantize(w[row : row + step], spec, "cpu", tensor_amax) for row in range(0, len(w), step)]
    np.testing.assert_array_equal(np.concatenate([part.codes for part in parts]), whole.codes)
    if spec.granularity.rows is None:
        assert all(part.scales == whole.scales for part in parts)
    else:
        np.testing.assert_array_equal(np.concatenate([part.scales for part in parts]), whole.scales)
    total = sum((part.stats for part in parts), start=CastStats())
    assert counts(total) == counts(whole.stats)
    assert total.noise == pytest.approx(whole.stats.noise, rel=1e-12, abs=0)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_identical_on_every_instruction_set(name: str) -> None:
    w, results = even_columns(gaussian((130, 515), torch.bfloat16), SPECS[name]), []
    for isa in ISAS:
        with instruction_set(isa):
            results.append(quantize(w, SPECS[name], "cpu").stats)
    assert all(stats == results[0] for stats in results)


@pytest.mark.parametrize(("dtype", "name"), DTYPES_AND_SPECS)
def test_nan_and_inf_are_counted(dtype: str, name: str) -> None:
    w = gaussian((140, 300), DTYPES[dtype])
    w[0, 0], w[3, 299], w[139, 77], w[139, 78] = torch.nan, torch.inf, -torch.inf, -torch.nan
    assert quantize(w, SPECS[name], "reference").nonfinite == 4
    for isa in ISAS:
        with instruction_set(isa):
            assert quantize(w, SPECS[name], "cpu").nonfinite == 4, isa


def test_many_threads_at_once_give_the_same() -> None:
    w = gaussian((256, 1024), torch.bfloat16)
    specs = [SPECS[name] for name in ("fp8-block", "mxfp4", "nvfp4", "fp8")] * 8
    alone = [quantize(w, spec, "cpu") for spec in specs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda spec: quantize(w, spec, "cpu"), specs))
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_array_equal(actual.scales, expected.scales)
        assert actual.stats == expected.stats


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "fp8", "nvfp4"])
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(name: str) -> None:
    w = gaussian((4, 256), torch.float32) * 1e-37
    expected = quantize(w, SPECS[name], "reference", tensor_amax=1e-37)
    with flushing_subnormals():
        actual = quantize(w, SPECS[name], "cpu", tensor_amax=1e-37)
        still_flushes = float(np.float32(1e-30) * np.float32(1e-10)) == 0.0
    np.testing.assert_array_equal(actual.codes, expected.codes)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    assert still_flushes, "the call changed the floating-point mode of its thread"


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_that_of_the_finite_elements(dtype: str) -> None:
    for shape in SHAPES:
        of_reference = functools.partial(amax, dtype=dtype, shape=shape, impl="reference")
        assert_amax_is_that_of_finite_elements(shape, dtype, of_reference)
        of_library = functools.partial(amax, dtype=dtype, shape=shape, impl="cpu")
        for isa in ISAS:
            with instruction_set(isa):
                assert_amax_is_that_of_finite_elements(shape, dtype, of_library)


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_need_not_be_aligned(dtype: str) -> None:
    w = gaussian((5, 100), DTYPES[dtype])
    buffer = np.empty(w.nbytes + 1, np.uint8)
    buffer[1:] = raw(w)
    actual = quantize_rows(buffer[1:], dtype, (5, 100), SPECS["mxfp8"], impl="cpu")
    np.testing.assert_array_equal(actual.codes, quantize(w, SPECS["mxfp8"], "cpu").codes)
