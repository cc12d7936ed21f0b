"""A grouped product reads each expert once: rows that share experts cost less than rows of different experts."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from minifloat.kernels import native
from minifloat.kernels.moe import PackedExperts, moe_linear
from minifloat.kernels.pack import allocate, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

EXPERTS, SHARED, ROWS, COLS = 64, 8, 768, 2048
CALLS = 12


def seconds(experts: PackedExperts, counts: list[int]) -> float:
    """Return the time of the fastest of some calls."""
    offsets = torch.tensor([0, *counts]).cumsum(0)
    x = torch.randn(sum(counts), COLS, generator=torch.Generator().manual_seed(0)).bfloat16()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        moe_linear(x, experts, offsets)
        times.append(time.perf_counter() - started)
    return min(times)


@pytest.mark.skipif(
    native.load() is None or not native.isa().startswith(("avx512", "amx")),
    reason="needs a product whose time is that of reading",
)
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="./scripts/sanitize changes what takes time")
@pytest.mark.parametrize("scheme", ["fp8", "mxfp4"])
def test_rows_that_share_experts_do_not_read_them_again(scheme: str) -> None:
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1))
    packed = pack(quantize_tensor(weight, SCHEMES[scheme].weight))
    copies = [replace(packed, data=allocate(packed.nbytes).copy_(packed.data)) for _ in range(EXPERTS)]
    experts = PackedExperts(copies)
    each = seconds(experts, [1] * EXPERTS)
    shared = seconds(experts, [EXPERTS // SHARED] * SHARED + [0] * (EXPERTS - SHARED))
    # The same number of rows, and an eighth of the bytes. Where products of MXFP4 are multiplied in float32, they take
    # more than half of the time, so that the bound leaves room for them: rows that read again would have about 1.
    assert shared < 0.75 * each
