"""`quantize_rows` and `amax`: errors for invalid arguments, and the choice of the implementation."""

from __future__ import annotations

import numpy as np
import pytest

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError, UsageError
from minifloat.kernels import native
from minifloat.kernels.quantize import amax, quantize_rows
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.granularity import CHANNEL, block_granularity
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec

needs_library = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

FP8, MXFP4 = SCHEMES["fp8"].weight, SCHEMES["mxfp4"].weight
SHAPE = (4, 256)
#: BF16 between 1 and 2, so finite.
DATA = (np.random.default_rng(0).integers(0, 128, SHAPE, np.uint16) | 0x3F80).view(np.uint8).reshape(-1)

#: What the native library leaves to the reference.
NOT_NATIVE = {
    "search over 64": WeightSpec(E2M1, block_granularity(1, 64), E8M0, ScaleRule.SEARCH),
    "blocks 20x20": WeightSpec(E4M3, block_granularity(20, 20)),
}


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_an_empty_slab_gives_empty_results(impl: str) -> None:
    result = quantize_rows(DATA[:0], "BF16", (0, 64), MXFP4, impl=impl)
    assert (result.codes.shape, result.scales.shape, result.stats.elements) == ((0, 32), (0, 2), 0)
    assert amax(DATA[:0], "BF16", (3, 0), impl=impl) == (0.0, 0)


def test_the_reference_counts_nan_and_inf() -> None:
    data = DATA.copy()
    data.view(np.uint16)[[0, 5, 1023]] = (0x7FC0, 0x7F80, 0xFF80)
    assert quantize_rows(data, "BF16", SHAPE, MXFP4, impl="reference").nonfinite == 3
    assert amax(data, "BF16", SHAPE, impl="reference")[1] == 3


@pytest.mark.parametrize("spec", NOT_NATIVE.values(), ids=NOT_NATIVE)
def test_auto_uses_the_reference_if_the_library_does_not_cover_the_spec(spec: WeightSpec) -> None:
    auto = quantize_rows(DATA, "BF16", SHAPE, spec)
    np.testing.assert_array_equal(auto.codes, quantize_rows(DATA, "BF16", SHAPE, spec, impl="reference").codes)


@needs_library
@pytest.mark.parametrize("spec", NOT_NATIVE.values(), ids=NOT_NATIVE)
def test_naming_the_library_for_a_spec_that_it_does_not_cover_is_an_error(spec: WeightSpec) -> None:
    with pytest.raises(KernelUnavailable, match=r"impl='cpu'.*not (group|block) "):
        quantize_rows(DATA, "BF16", SHAPE, spec, impl="cpu")


def test_auto_uses_the_reference_if_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_unavailable", lambda: "it was not built")
    with pytest.raises(KernelUnavailable, match="it was not built"):
        quantize_rows(DATA, "BF16", SHAPE, FP8, impl="cpu")
    auto = quantize_rows(DATA, "BF16", SHAPE, FP8)
    np.testing.assert_array_equal(auto.codes, quantize_rows(DATA, "BF16", SHAPE, FP8, impl="reference").codes)
    assert amax(DATA, "BF16", SHAPE) == amax(DATA, "BF16", SHAPE, impl="reference")


@pytest.mark.parametrize("impl", ["auto", "reference", pytest.param("cpu", marks=needs_library)])
def test_a_rule_that_does_not_fit_the_scale_format_is_an_error(impl: str) -> None:
    with pytest.raises((ValueError, KernelUnavailable), match="E8M0"):
        quantize_rows(DATA, "BF16", SHAPE, WeightSpec(E4M3, CHANNEL, E8M0, ScaleRule.AMAX), impl=impl)


def test_an_unknown_impl_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="auto, reference, cpu, triton"):
        quantize_rows(DATA, "BF16", SHAPE, FP8, impl="gpu")
    with pytest.raises(UnknownNameError, match="auto, reference, cpu, triton"):
        amax(DATA[:0], "BF16", (0, 0), impl="gpu")


def test_a_source_that_does_not_fit_its_shape_is_refused() -> None:
    with pytest.raises(UnsupportedTensorError, match="I16"):
        quantize_rows(DATA, "I16", SHAPE, FP8)
    with pytest.raises(ShapeError, match="2048 bytes, got 2047"):
        quantize_rows(DATA[1:], "BF16", SHAPE, FP8)
    with pytest.raises(ShapeError, match="4096 bytes, got 2048"):
        amax(DATA, "F32", SHAPE)
    with pytest.raises(ShapeError, match="matrix"):
        quantize_rows(DATA, "BF16", (-4, -256), FP8)
    with pytest.raises(ShapeError, match="even K"):
        quantize_rows(DATA[: 2 * 4 * 63], "BF16", (4, 63), MXFP4)


def test_a_source_that_is_not_contiguous_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        quantize_rows(DATA.view(np.int8), "BF16", SHAPE, FP8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous uint8"):
        quantize_rows(np.repeat(DATA, 2)[::2], "BF16", SHAPE, FP8)


@pytest.mark.parametrize("name", ["fp8-static", "nvfp4"])
@pytest.mark.parametrize("tensor_amax", [None, -1.0, float("nan"), float("inf")])
def test_a_tensor_amax_that_is_missing_or_no_magnitude_is_refused(name: str, tensor_amax: float | None) -> None:
    with pytest.raises(UsageError, match="tensor_amax"):
        quantize_rows(DATA, "BF16", SHAPE, SCHEMES[name].weight, tensor_amax=tensor_amax)


def test_outputs_that_do_not_fit_are_refused() -> None:
    read_only = np.empty(SHAPE, np.uint8)
    read_only.flags.writeable = False
    transposed = np.empty((256, 4), np.uint8).T
    for codes in (np.empty((4, 255), np.uint8), np.empty(SHAPE, np.int8), transposed, read_only):
        with pytest.raises(ValueError, match="codes of out"):
            quantize_rows(DATA, "BF16", SHAPE, FP8, out=(codes, None))  # type: ignore[arg-type]
    for scales in (np.empty(4, np.float32), np.empty((4, 1), np.uint8)):
        with pytest.raises(ValueError, match="scales of out"):
            quantize_rows(DATA, "BF16", SHAPE, FP8, out=(None, scales))
