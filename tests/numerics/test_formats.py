"""Tests of the facts of each format against its specification, and that no other module spells them out."""

from __future__ import annotations

import ast
import io
import math
import pickle
import struct
import tokenize
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import minifloat
from minifloat.errors import UnknownNameError
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
    get_format,
)

PACKAGE = Path(minifloat.__file__).parent
#: Numbers that no other module of the package may spell out: largest values and their product.
FORMAT_FACTS = {448, 57344, 2688}
#: Integers that modules about scales and layouts may not spell out: biases, block sizes and code limits.
BLOCK_FACTS = {127, 128, 32}

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


@pytest.mark.parametrize(
    ("fmt", "largest", "min_normal", "min_positive", "emax", "emin"),
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 8, -6),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 15, -14),
        (E2M1, 6.0, 1.0, 0.5, 2, 0),
        (E8M0, 2.0**127, 2.0**-127, 2.0**-127, 127, -127),
        (FLOAT16, 65504.0, 2.0**-14, 2.0**-24, 15, -14),
        (BFLOAT16, 255 * 2.0**120, 2.0**-126, 2.0**-133, 127, -126),
        (FLOAT32, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149, 127, -126),
    ],
    ids=lambda v: v.name if isinstance(v, ElementFormat) else "",
)
def test_range_is_that_of_the_specification(
    fmt: ElementFormat, largest: float, min_normal: float, min_positive: float, emax: int, emin: int
) -> None:
    assert (fmt.max, fmt.min_normal, fmt.min_positive) == (largest, min_normal, min_positive)
    assert (fmt.emax, fmt.emin) == (emax, emin)


@pytest.mark.parametrize(
    ("fmt", "finite", "nan", "infinite"),
    [
        (E4M3, 254, {0x7F, 0xFF}, set()),
        (E5M2, 248, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}, {0x7C, 0xFC}),
        (E2M1, 16, set(), set()),
        (E8M0, 255, {0xFF}, set()),
    ],
    ids=lambda v: v.name if isinstance(v, ElementFormat) else "",
)
def test_special_codes_are_those_of_the_specification(
    fmt: ElementFormat, finite: int, nan: set[int], infinite: set[int]
) -> None:
    assert {code for code, value in enumerate(fmt.values) if math.isnan(value)} == nan
    assert {code for code, value in enumerate(fmt.values) if math.isinf(value)} == infinite
    assert sum(math.isfinite(value) for value in fmt.values) == finite
    assert fmt.nan_code in nan if nan else fmt.nan_code is None


def test_known_codes_decode_to_the_values_of_the_specification() -> None:
    assert (E4M3.max_code, E5M2.max_code, E2M1.max_code, E8M0.max_code) == (0x7E, 0x7B, 0x7, 0xFE)
    assert E2M1.values[:8] == (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    assert E2M1.values[8:] == tuple(-value for value in E2M1.values[:8])
    assert [E4M3.decode(code) for code in (0x38, 0x01, 0x08, 0xB8)] == [1.0, 2.0**-9, 2.0**-6, -1.0]
    assert [E5M2.decode(code) for code in (0x3C, 0x01, 0x04, 0xBC)] == [1.0, 2.0**-16, 2.0**-14, -1.0]
    assert [E8M0.decode(code) for code in (0, 127, 254)] == [2.0**-127, 1.0, 2.0**127]


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (E4M3, ml_dtypes.float8_e4m3fn),
        (E5M2, ml_dtypes.float8_e5m2),
        (E2M1, ml_dtypes.float4_e2m1fn),
        (E8M0, ml_dtypes.float8_e8m0fnu),
        (BFLOAT16, ml_dtypes.bfloat16),
        (FLOAT16, np.float16),
        (FLOAT32, np.float32),
    ],
    ids=lambda v: v.name if isinstance(v, ElementFormat) else "",
)
def test_facts_agree_with_those_that_ml_dtypes_reports(fmt: ElementFormat, dtype: type) -> None:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    assert fmt.bits == info.bits
    assert fmt.mantissa_bits == info.nmant
    assert fmt.max == float(info.max)
    assert fmt.min_positive == float(info.smallest_subnormal)
    assert fmt.min_normal == float(info.smallest_normal)


@pytest.mark.parametrize("code", [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x80000001, 0xC2F6E979])
def test_float32_codes_decode_as_struct_decodes_them(code: int) -> None:
    assert FLOAT32.decode(code) == struct.unpack("<f", struct.pack("<I", code))[0]


@each_format
def test_the_nan_code_decodes_to_nan(fmt: ElementFormat) -> None:
    assert fmt.nan_code is None or math.isnan(fmt.decode(fmt.nan_code))
    assert (fmt.nan_code is None) == (fmt in (E2M1, INT4, INT8))


def test_integers_are_codes_less_an_offset_as_compressed_tensors_packs_them() -> None:
    assert INT4.values == tuple(float(value) for value in range(-8, 8))
    assert INT8.values == tuple(float(value) for value in range(-128, 128))
    assert (INT4.bits, INT8.bits, INT4.max, INT8.max) == (4, 8, 7.0, 127.0)
    assert all(pickle.loads(pickle.dumps(fmt)) is fmt for fmt in (INT4, INT8))


@each_format
def test_codes_outside_the_width_are_refused(fmt: ElementFormat) -> None:
    for code in (-1, 1 << fmt.bits):
        with pytest.raises(ValueError, match=f"{fmt.name} codes are 0.."):
            fmt.decode(code)


def test_formats_wider_than_8_bits_refuse_to_list_their_values() -> None:
    with pytest.raises(ValueError, match="BF16 has too many codes"):
        _ = BFLOAT16.values


@each_format
def test_formats_are_found_by_name(fmt: ElementFormat) -> None:
    assert get_format(fmt.name) is fmt


def test_an_unknown_format_lists_the_valid_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown format 'E3M4'; valid: E4M3, E5M2, E2M1, E8M0, FP32, BF16, FP16, INT4, INT8"
    ):
        get_format("E3M4")


def repeated_facts(source: str, *, blocks_too: bool) -> list[tuple[int, str]]:
    """Return line and text of every number token that spells out a fact of a format, outside strings and comments."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.NUMBER:
            continue
        value = ast.literal_eval(token.string)
        is_fact = value in FORMAT_FACTS or (isinstance(value, float) and value == E2M1.max)
        if is_fact or (blocks_too and value in BLOCK_FACTS):
            found.append((token.start[0], token.string))
    return found


def test_no_other_module_spells_out_the_largest_values_block_sizes_or_biases() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.name in ("numerics/formats.py", "numerics/granularity.py"):
            continue
        blocks_too = name.parts[:2] == ("model", "layouts") or (name.parts[0] == "quantize" and len(name.parts) == 2)
        found += [(str(name), *hit) for hit in repeated_facts(path.read_text(), blocks_too=blocks_too)]
    assert found == []
