"""Batch-invariant products: a row of the result has the same bits alone and among any number of other rows."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, KINDS, Kernels, bits, make

#: Numbers of rows on both sides of every limit of `csrc/linear/choose.cpp`.
ROWS = (*range(2, 18), 25, 48, 49, 64, 100)
SHAPE = (70, 672)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_among_others(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    packed = kernels.pack(make(kind, *SHAPE))
    x = torch.randn(max(ROWS), SHAPE[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([kernels.linear(row[None], packed, batch_invariant=True) for row in x])
    for rows in ROWS:
        for threads in (1, 2):
            together = kernels.linear(x[:rows], packed, threads=threads, batch_invariant=True)
            assert torch.equal(bits(together), bits(alone[:rows])), f"{rows} rows, {threads} threads"
