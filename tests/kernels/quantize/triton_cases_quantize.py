"""The Triton quantizer against the reference, bit for bit; `test_triton.py` runs it in the interpreter and on a GPU."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from modes import each_value
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
from triton_cases import device

from minifloat.kernels.quantize import amax, quantize_rows, triton
from minifloat.numerics.formats import E2M1, E4M3, E5M2, ElementFormat
from minifloat.numerics.granularity import TENSOR, block_granularity
from minifloat.numerics.scheme import WeightSpec

DEVICE = device()
SPECS = SPECS | {"e5m2-block-32x64": WeightSpec(E5M2, block_granularity(32, 64))}
#: Around the sizes of groups and blocks, and of what a program takes (4096).
LONG = (2, 4100)
SHAPES = ((1, 1), (2, 30), (7, 100), LONG, (129, 127))
#: Columns that are read 16 bytes at a time, with blocks and rows that reach beyond the slab.
ALIGNED = ((64, 64), (32, 64), (128, 64), (96, 48), (64, 160))
#: Of one value from sums in another order, both in float64.
SUMS_RTOL = 1e-12

#: The interpreter is slow: what does not depend on blocks and rules is tried with one scheme of each kind.
KINDS = ("fp8-block", "fp8", "fp8-static", "mxfp8", "mxfp4", "nvfp4")

specs = pytest.mark.parametrize("name", distinct(SPECS))
kinds = pytest.mark.parametrize("name", KINDS)


def assert_matches(w: torch.Tensor, spec: WeightSpec, tensor_amax: float | None = None) -> None:
    w = even_columns(w, spec)
    expected, actual = (quantize(w, spec, impl, tensor_amax, DEVICE) for impl in ("reference", "triton"))
    np.testing.assert_array_equal(actual.scales, expected.scales)
    np.testing.assert_array_equal(actual.codes, expected.codes)
    assert actual.nonfinite == expected.nonfinite
    for counted in ("elements", "saturated", "flushed"):
        assert getattr(actual.stats, counted) == getattr(expected.stats, counted)
    assert actual.stats.signal == pytest.approx(expected.stats.signal, rel=SUMS_RTOL, abs=0)
    assert actual.stats.noise == pytest.approx(expected.stats.noise, rel=SUMS_RTOL, abs=0)


@specs
def test_ragged_shapes(name: str) -> None:
    shapes = SHAPES if name in KINDS else SHAPES[2:3] + SHAPES[4:]
    if DEVICE == "cpu" and SPECS[name].granularity.cols is not None:  # a row beyond a program concerns whole rows only
        shapes = tuple(shape for shape in shapes if shape != LONG)
    for seed, shape in enumerate(shapes):
        assert_matches(gaussian(shape, torch.bfloat16, seed), SPECS[name])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing: ragged shapes are the same to it")
@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, list(DTYPES)))
def test_aligned_shapes_smaller_than_a_tile(name: str, dtype: str) -> None:
    for seed, shape in enumerate(ALIGNED):
        assert_matches(gaussian(shape, DTYPES[dtype], seed), SPECS[name])


@kinds
def test_programs_of_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_MANY_TILES", 2)
    rows = 150 if DEVICE == "cuda" or name == "fp8-block" else 70
    assert_matches(gaussian((rows, 390), torch.bfloat16), SPECS[name])


@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, ["F16", "F32"]))
def test_other_source_dtypes(name: str, dtype: str) -> None:
    assert_matches(gaussian((40, 260), DTYPES[dtype]), SPECS[name])


@kinds
def test_every_value_of_bfloat16(name: str) -> None:
    values, shuffled = sixteen_bit_values(torch.bfloat16)
    for order in (values, shuffled) if name in ("fp8-block", "mxfp4") else (shuffled,):
        assert_matches(order, SPECS[name])


@kinds
def test_float32_of_every_binade(name: str) -> None:
    for order in every_binade(66, 258):
        assert_matches(order, SPECS[name])


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
@pytest.mark.parametrize("scale", [1.0, 0.75, 1.0 / 3.0])
def test_ties_and_their_neighbours(element: ElementFormat, scale: float) -> None:
    w = ties_and_neighbours(element, scale)
    assert_matches(w, WeightSpec(element, TENSOR), tensor_amax=element.max * scale)


@pytest.mark.parametrize(("name", "factor"), each_value(KINDS, [1e-42, 1e-36, 1e37]))
def test_the_ends_of_float32(name: str, factor: float) -> None:
    assert_matches(gaussian((17, 200)) * factor, SPECS[name])


@pytest.mark.parametrize("name", SEARCHES)
def test_the_search_between_equally_good_scales(name: str) -> None:
    for w in between_equally_good_scales(SPECS[name], 512):
        assert_matches(w, SPECS[name])


@kinds
def test_zeros_and_outliers(name: str) -> None:
    mixed = gaussian((34, 260), torch.bfloat16)
    mixed[:, 128:] = 0
    mixed[33, 5] = 3e4
    for w in (mixed, -torch.zeros(3, 260, dtype=torch.bfloat16)):
        assert_matches(w, SPECS[name])


@pytest.mark.parametrize("name", [name for name in distinct(SPECS) if SPECS[name].needs_tensor_amax])
@pytest.mark.parametrize("tensor_amax", [0.0, 1e-38, 1e-30, 1.0, 1e30])
def test_the_given_tensor_amax_is_used(name: str, tensor_amax: float) -> None:
    assert_matches(gaussian((5, 300), torch.bfloat16), SPECS[name], tensor_amax)


@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, list(DTYPES)))
def test_nan_and_inf_are_counted(name: str, dtype: str) -> None:
    rows = 131 if DEVICE == "cuda" or name == "fp8-block" else 35  # either way of several programs
    w = gaussian((rows, 140), DTYPES[dtype])
    w[0, 0], w[3, 139], w[-1, 77], w[-1, 78] = torch.nan, torch.inf, -torch.inf, -torch.nan
    assert quantize(w, SPECS[name], "triton", device=DEVICE).nonfinite == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_that_of_the_finite_elements(dtype: str) -> None:
    for shape in (*SHAPES, (30, 700)):
        on_device = functools.partial(amax, dtype=dtype, shape=shape, impl="triton", device=DEVICE)
        assert_amax_is_that_of_finite_elements(shape, dtype, on_device)


def test_read_only_memory_is_accepted() -> None:
    w = gaussian((3, 64), torch.bfloat16)
    data = np.frombuffer(raw(w).tobytes(), np.uint8)
    result = quantize_rows(data, "BF16", (3, 64), SPECS["mxfp8"], impl="triton", device=DEVICE)
    np.testing.assert_array_equal(result.codes, quantize(w, SPECS["mxfp8"], "reference").codes)
    assert amax(data, "BF16", (3, 64), impl="triton", device=DEVICE) == (float(w.abs().max()), 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has one state for all threads")
def test_many_threads_at_once_give_the_same() -> None:
    slabs = [gaussian(shape, torch.bfloat16, seed) for seed, shape in enumerate(((256, 1024), *ALIGNED))]
    jobs = [(w, SPECS[name]) for name in ("fp8-block", "mxfp4", "nvfp4", "fp8") for w in slabs] * 8
    alone = [quantize(w, spec, "triton", device=DEVICE) for w, spec in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: quantize(*job, "triton", device=DEVICE), jobs))
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_array_equal(actual.scales, expected.scales)
        assert actual.stats == expected.stats
