"""Every format on every instruction set against the product in float64, over numbers of rows, shapes and dtypes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from kernel_cases import DTYPES, KINDS, Kernels, Stored, assert_close, assert_within_bar, fits, inputs, make, product

#: All that a kernel for few rows may unroll, then both sides of each power of two.
NUMBERS_OF_ROWS = (*range(1, 41), 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 255, 256, 257, 512, 513)
#: A sum of thousands in float32 rounds a thousand times more often than one of a hundred.
LONG_BAR = 1e-5
ROWS = (1, 31, 32, 33, 47, 100)
COLS = (1, 2, 16, 31, 32, 33, 48, 63, 64, 65, 100, 128, 160)

kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def weight(kind: str, rows: int, cols: int) -> tuple[Stored, torch.Tensor]:
    stored = make(kind, rows, cols)
    return stored, stored.values()


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_of_rows(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored, values = weight(kind, 100, 228)
    packed = kernels.pack(stored)
    x, bias = inputs(max(NUMBERS_OF_ROWS), 228, dtype), inputs(1, 100, dtype)[0]
    exact = product(x, values, bias)
    for m in NUMBERS_OF_ROWS:
        result = kernels.linear(x[:m], packed, bias)
        assert_close(result, exact[:m], x[:m], values)
        assert_within_bar(result, exact[:m])


@kinds
@pytest.mark.parametrize(("m", "dtype"), [(1100, torch.bfloat16), (600, torch.float16), (400, torch.float32)], ids=str)
def test_more_than_one_block_of_everything(kernels: Kernels, kind: str, m: int, dtype: torch.dtype) -> None:
    stored, values = weight(kind, 300, 600)
    x, bias = inputs(m, 600, dtype), inputs(1, 300, dtype)[0]
    exact = many_sums(kind, m, dtype)
    result = kernels.linear(x, kernels.pack(stored), bias, threads=2)
    assert_close(result, exact, x, values)
    assert_within_bar(result, exact)


@functools.cache
def many_sums(kind: str, m: int, dtype: torch.dtype) -> torch.Tensor:
    return product(inputs(m, 600, dtype), weight(kind, 300, 600)[1], inputs(1, 300, dtype)[0])


@kinds
def test_ragged_shapes(kernels: Kernels, kind: str) -> None:
    dtypes = itertools.cycle(DTYPES)
    for rows, cols in itertools.product(ROWS, COLS):
        if not fits(kind, cols):
            continue
        stored, values = weight(kind, rows, cols)
        packed = kernels.pack(stored)
        for m in (1, 2, 5, 16, 33, 70):
            x = inputs(70, cols, next(dtypes))[:m]
            assert_close(kernels.linear(x, packed), product(x, values), x, values)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_sums(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    stored, values = weight(kind, 65, 4096)
    packed = kernels.pack(stored)
    x = inputs(65, 4096, dtype)
    exact = product(x, values)
    for m in (1, 3, 8, 16, 40, 65):
        result = kernels.linear(x[:m], packed)
        assert_close(result, exact[:m], x[:m], values, sums=4e-6)
        assert_within_bar(result, exact[:m], LONG_BAR if dtype is torch.float32 else None)
