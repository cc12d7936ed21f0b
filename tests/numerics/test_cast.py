"""Tests of encode and decode against torch's float8 dtypes, ml_dtypes, and exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from minifloat.errors import UnknownNameError
from minifloat.numerics.cast import decode, encode, torch_dtype
from minifloat.numerics.formats import (
    BFLOAT16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    FLOAT16,
    FLOAT32,
    FORMATS,
    INT4,
    INT8,
    ElementFormat,
)

ENCODED = (E4M3, E5M2, E2M1)
ML_DTYPES = {
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
    E2M1: ml_dtypes.float4_e2m1fn,
    E8M0: ml_dtypes.float8_e8m0fnu,
}
TORCH_FLOAT8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E8M0: torch.float8_e8m0fnu}

each_encoded = pytest.mark.parametrize("fmt", ENCODED, ids=lambda f: f.name)


def all_codes(fmt: ElementFormat) -> torch.Tensor:
    return torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8)


def positive_values(fmt: ElementFormat) -> list[float]:
    """Return the finite values of the non-negative codes, in order."""
    return [fmt.decode(code) for code in range(fmt.max_code + 1)]


def float32_bits(x: torch.Tensor) -> np.ndarray:
    """Return bit patterns in which all NaN are equal and -0 differs from 0."""
    array = x.to(torch.float32).numpy()
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


def encode_with_ml_dtypes(x: torch.Tensor, fmt: ElementFormat) -> np.ndarray:
    """Encode by ml_dtypes, with the input clamped first because ml_dtypes does not saturate."""
    clamped = np.clip(x.to(torch.float32).numpy(), -fmt.max, fmt.max)
    codes: np.ndarray = clamped.astype(ML_DTYPES[fmt]).view(np.uint8)
    return codes


def encode_exactly(x: float, fmt: ElementFormat) -> int:
    """Return the code of the nearest value by rational arithmetic over all values; on a tie, the even code."""
    sign = int(math.copysign(1.0, x) < 0) << (fmt.bits - 1)
    magnitude = Fraction(min(abs(x), fmt.max))
    values = positive_values(fmt)
    return sign | min(range(len(values)), key=lambda c: (abs(Fraction(values[c]) - magnitude), c % 2))


def boundary_inputs(fmt: ElementFormat) -> torch.Tensor:
    """Return all values, all midpoints, the float32 on both sides of each, and the ends of float32, with both signs."""
    values = positive_values(fmt)
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    step = values[-1] - values[-2]
    beyond = [fmt.max + step / 2, fmt.max + step, FLOAT32.max, math.inf]
    tiny = [FLOAT32.min_positive, FLOAT32.min_normal, BFLOAT16.min_positive]
    centres = np.array([*values, *midpoints, *beyond, *tiny], dtype=np.float32)
    with np.errstate(over="ignore"):
        above, below = np.nextafter(centres, np.float32(np.inf)), np.nextafter(centres, np.float32(0))
    inputs = np.concatenate([centres, above, below])
    return torch.from_numpy(np.concatenate([inputs, -inputs]))


def all_inputs(dtype: torch.dtype) -> torch.Tensor:
    """Return every number of a 16-bit format except NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    return x[~x.isnan()]


@pytest.mark.parametrize("fmt", TORCH_FLOAT8, ids=lambda f: f.name)
def test_every_code_decodes_as_torch_decodes_it(fmt: ElementFormat) -> None:
    codes = all_codes(fmt)
    expected = codes.view(TORCH_FLOAT8[fmt]).to(torch.float32)
    np.testing.assert_array_equal(float32_bits(decode(codes, fmt)), float32_bits(expected))


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=lambda f: f.name)
def test_every_code_decodes_as_ml_dtypes_decodes_it(fmt: ElementFormat) -> None:
    codes = all_codes(fmt)
    expected = torch.from_numpy(codes.numpy().view(ML_DTYPES[fmt]).astype(np.float32))
    np.testing.assert_array_equal(float32_bits(decode(codes, fmt)), float32_bits(expected))


@each_encoded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input_encodes_as_ml_dtypes_encodes_it(fmt: ElementFormat, dtype: torch.dtype) -> None:
    x = all_inputs(dtype)
    np.testing.assert_array_equal(encode(x, fmt).numpy(), encode_with_ml_dtypes(x, fmt))


@each_encoded
def test_float32_at_and_beside_every_boundary_goes_to_the_nearest_even_code(fmt: ElementFormat) -> None:
    x = boundary_inputs(fmt)
    expected = [encode_exactly(value, fmt) for value in x.tolist()]
    codes = encode(x, fmt)
    assert codes.tolist() == expected
    np.testing.assert_array_equal(codes.numpy(), encode_with_ml_dtypes(x, fmt))


@each_encoded
def test_random_float32_bit_patterns_encode_as_ml_dtypes_encodes_them(fmt: ElementFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=generator).to(torch.int32).view(torch.float32)
    x = x[~x.isnan()]
    np.testing.assert_array_equal(encode(x, fmt).numpy(), encode_with_ml_dtypes(x, fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_nan_of_either_sign_and_any_payload_becomes_the_nan_code(fmt: ElementFormat) -> None:
    bits = [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x00400000, -1]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert bool(x.isnan().all())
    assert encode(x, fmt).tolist() == [0x7F] * len(bits)


def test_nan_is_refused_by_a_format_without_nan() -> None:
    with pytest.raises(ValueError, match="E2M1 cannot hold NaN"):
        encode(torch.tensor([1.0, math.nan]), E2M1)


@each_encoded
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 5), (2, 3, 4)], ids=str)
def test_shapes_are_kept(fmt: ElementFormat, shape: tuple[int, ...]) -> None:
    codes = encode(torch.ones(shape), fmt)
    assert codes.shape == shape
    assert codes.dtype == torch.uint8
    assert decode(codes, fmt).shape == shape
    assert bool((decode(codes, fmt) == 1).all())


def test_a_transposed_view_encodes_like_its_copy_and_is_not_changed() -> None:
    x = torch.linspace(-500, 500, 35).view(5, 7)
    before = x.clone()
    assert torch.equal(encode(x.T, E4M3), encode(x.T.contiguous(), E4M3))
    assert torch.equal(x, before)


def test_changing_a_decoded_tensor_does_not_change_the_next_one() -> None:
    codes = all_codes(E2M1)
    decode(codes, E2M1).fill_(math.nan)
    assert decode(codes, E2M1).tolist() == list(E2M1.values)


@pytest.mark.parametrize("fmt", [E8M0, FLOAT32, BFLOAT16, FLOAT16], ids=lambda f: f.name)
def test_encode_refuses_formats_that_are_unsigned_or_wider_than_8_bits(fmt: ElementFormat) -> None:
    with pytest.raises(ValueError, match=fmt.name):
        encode(torch.ones(2), fmt)


def test_decode_refuses_wide_formats_other_dtypes_and_packed_codes() -> None:
    with pytest.raises(ValueError, match="FP16"):
        decode(torch.zeros(2, dtype=torch.uint8), FLOAT16)
    with pytest.raises(ValueError, match="must be uint8"):
        decode(torch.zeros(2, dtype=torch.int32), E4M3)
    with pytest.raises(ValueError, match=r"0\.\.15, got 16; unpack nibbles first"):
        decode(torch.tensor([1, 16], dtype=torch.uint8), E2M1)


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f not in (E2M1, INT4, INT8)], ids=lambda f: f.name)
def test_torch_dtypes_have_the_width_and_the_largest_value_of_the_format(fmt: ElementFormat) -> None:
    dtype = torch_dtype(fmt)
    assert dtype.itemsize * 8 == fmt.bits
    assert torch.finfo(dtype).max == fmt.max


def test_a_format_without_a_torch_dtype_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UnknownNameError, match=r"'E2M1'; valid: E4M3, E5M2, E8M0"):
        torch_dtype(E2M1)
