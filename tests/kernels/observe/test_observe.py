"""`observe`: every implementation and instruction set against counts computed in the test."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from minifloat.errors import KernelUnavailable, UnknownNameError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.observe import DTYPES, observe
from minifloat.numerics.histogram import BINS, FINITE_BINS

LIBRARY = native.load()
RUNS = ["reference", *(LIBRARY.isas if LIBRARY else ())]


@pytest.fixture(params=RUNS)
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reference, then the native library with every instruction set."""
    if request.param == "reference":
        yield "reference"
        return
    assert LIBRARY is not None
    bound = LIBRARY.with_isa(request.param)
    monkeypatch.setattr(native, "load", lambda: bound)
    yield "cpu"


def expected(x: torch.Tensor) -> tuple[float, int, np.ndarray]:
    """Amax, NaN and Inf, and histogram, by way of float64 and of the bits of each element."""
    wide = x.flatten().to(torch.float64)
    finite = wide[wide.isfinite()].abs()
    bits = x.flatten().to(torch.float32).view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    counts = np.zeros(BINS, np.int64)
    for value in (bits >> 20).tolist():
        counts[value] += 1
    return (float(finite.max()) if len(finite) else 0.0), int((~wide.isfinite()).sum()), counts


def check(x: torch.Tensor, impl: str, threads: int = 1) -> None:
    amax, nonfinite, counts = expected(x)
    assert observe(x, impl=impl, threads=threads) == (amax, nonfinite)
    histogram = np.zeros(BINS, np.int64)
    assert observe(x, histogram, impl=impl, threads=threads) == (amax, nonfinite)
    np.testing.assert_array_equal(histogram[:FINITE_BINS], counts[:FINITE_BINS])
    assert histogram[FINITE_BINS:].sum() == nonfinite  # which of these a NaN is in depends on its payload


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_measured_as_torch_does(dtype: torch.dtype, impl: str) -> None:
    check(torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype), impl)


def test_float32_of_every_exponent_goes_into_the_bin_of_its_leading_bits(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_011,), generator=generator, dtype=torch.int64).to(torch.int32)
    check(bits.view(torch.float32), impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 65, 1023, 1024, 1025, 65_537, 66_000])
def test_odd_sizes_at_odd_addresses_are_measured_whole(dtype: torch.dtype, count: int, impl: str) -> None:
    x = torch.randn(count + 1, generator=torch.Generator().manual_seed(count)).to(dtype)
    check(x[1:], impl)
    check(x[:-1], impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_counted_and_do_not_hide_the_amax(dtype: torch.dtype, bad: float, impl: str) -> None:
    x = torch.linspace(-3, 2, 5001).to(dtype)
    x[[0, 17, 5000]] = bad
    amax, nonfinite = observe(x, impl=impl)
    assert nonfinite == 3
    assert amax == float(x[1].abs())
    check(x, impl)


def test_a_tensor_of_nothing_but_nan_has_amax_zero(impl: str) -> None:
    assert observe(torch.full((40,), float("nan")), impl=impl) == (0.0, 40)


def test_more_equal_values_than_a_16_bit_counter_holds_are_all_counted(impl: str) -> None:
    histogram = np.zeros(BINS, np.int64)
    assert observe(torch.ones(1_000_003, dtype=torch.bfloat16), histogram, impl=impl, threads=1) == (1.0, 0)
    assert histogram.sum() == histogram[0x3F80 >> 4] == 1_000_003


def test_a_histogram_is_added_to(impl: str) -> None:
    histogram = np.full(BINS, 5, np.int64)
    observe(torch.zeros(3), histogram, impl=impl)
    assert histogram[0] == 8
    assert (histogram[1:] == 5).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_nothing(threads: int, impl: str) -> None:
    x = torch.randn(5, 1_000_001, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[3, 999] = 1000.0
    x[4, -1] = float("inf")
    histogram, alone = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    assert observe(x, histogram, impl=impl, threads=threads) == (1000.0, 1)
    observe(x, alone, impl="reference")
    np.testing.assert_array_equal(histogram, alone)


def test_an_empty_tensor_has_amax_zero(impl: str) -> None:
    assert observe(torch.empty(0, 64), impl=impl) == (0.0, 0)


def test_invalid_arguments_of_observe_are_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="contiguous"):
        observe(torch.zeros(4, 4).T)
    with pytest.raises(UnsupportedTensorError, match="float64"):
        observe(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(UnknownNameError, match="valid: auto"):
        observe(torch.zeros(4), impl="fast")
    with pytest.raises(ValueError, match="int64"):
        observe(torch.zeros(4), np.zeros(BINS, np.int32))  # type: ignore[arg-type]


def test_without_the_library_the_named_implementation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_unavailable", lambda: "not built")
    assert observe(torch.tensor([-2.0, 1.0])) == (2.0, 0)
    with pytest.raises(KernelUnavailable, match="not built"):
        observe(torch.zeros(4), impl="cpu")
