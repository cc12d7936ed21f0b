"""The Triton kernels in Triton's interpreter against plain PyTorch; `test_triton.py` runs this file."""

from __future__ import annotations

import pytest
import torch
from modes import each_pair
from torch import Tensor

from minifloat.kernels import paged as reference
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.paged import PagedCache, rotary_table
from minifloat.kernels.paged import triton as fast
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E4M3

# The interpreter rounds bfloat16 wrongly, so operands are float32 and float16.
BLOCKS = 48
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def cache_of(kv_heads: int, d: int, element: str) -> PagedCache:
    """A cache of two layers that holds NaN everywhere."""
    scales = random(2, 2, kv_heads, seed=5).abs() * 0.1 + 0.01
    cache = PagedCache(2, kv_heads, d, BLOCKS, element, torch.device("cpu"), 16, scales)
    cache.data.view(torch.uint8).fill_(0xFF)
    return cache


@dtypes
@pytest.mark.parametrize("hidden", [1, 72, 1024, 1500])
def test_the_norm_after_an_addition(dtype: torch.dtype, hidden: int) -> None:
    x, delta, weight = random(5, hidden), random(5, hidden, seed=1).to(dtype), random(hidden, seed=2)
    mine, theirs = x.clone(), x.clone()
    found = fast.add_norm(mine, delta, weight, 1e-5, dtype)
    expected = reference.add_norm(theirs, delta, weight, 1e-5, dtype)
    assert torch.equal(mine, theirs)
    torch.testing.assert_close(found, expected, atol=ATOL[dtype], rtol=1e-3 if dtype == torch.float16 else 1e-5)
    alone = fast.add_norm(mine, None, weight, 1e-5, dtype)
    assert torch.equal(mine, theirs)
    assert torch.equal(alone, found)


@dtypes
@pytest.mark.parametrize("columns", [1, 88, 1024, 1500])
def test_silu_and_the_product(dtype: torch.dtype, columns: int) -> None:
    gate_up = random(3, 2 * columns, scale=4.0).to(dtype)
    found, expected = fast.silu_and_multiply(gate_up), reference.silu_and_multiply(gate_up)
    torch.testing.assert_close(found, expected, atol=ATOL[dtype], rtol=1e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize(
    ("shape", "norms", "element"),
    each_pair([(4, 2, 16), (6, 1, 24), (3, 3, 40)], [False, True], ["float32", "float16", E4M3.name]),
)
def test_keys_and_values_are_written_to_their_cache_rows_only(
    shape: tuple[int, int, int], norms: bool, element: str
) -> None:
    heads, kv_heads, d = shape
    tokens = 7
    qkv = random(tokens, (heads + 2 * kv_heads) * d, scale=3.0)
    weights = (random(d, seed=3), random(d, seed=4)) if norms else (None, None)
    rotary = rotary_table(100.0 ** -torch.arange(d // 2 - 1 or 1).float(), 1.1, 50)  # two dimensions stay, or none
    # As a step has them: columns of one tensor.
    rows = torch.tensor(
        [[p, b * BLOCK_TOKENS + p % BLOCK_TOKENS] for p, b in zip(range(20, 27), range(3, 10), strict=True)]
    )
    positions, cache_rows = rows.int().unbind(1)
    mine, theirs = cache_of(kv_heads, d, element), cache_of(kv_heads, d, element)
    q = fast.rotate_and_store(qkv, weights, 1e-5, rotary, positions, cache_rows, mine, 1)
    expected = reference.rotate_and_store(qkv, weights, 1e-5, rotary, positions, cache_rows, theirs, 1)
    assert torch.equal(mine.data[0].view(torch.uint8), theirs.data[0].view(torch.uint8))
    torch.testing.assert_close(q, expected, atol=5e-6, rtol=1e-5)
    if norms:  # the square root is another
        if element == E4M3.name:
            assert (mine.data.int() - theirs.data.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine.data, theirs.data, atol=1e-5, rtol=1e-3, equal_nan=True)
    else:
        assert torch.equal(mine.data.view(torch.uint8), theirs.data.view(torch.uint8))


def test_rounding_to_e4m3_is_that_of_the_oracle_for_every_value_and_every_tie() -> None:
    values = decode(torch.arange(256, dtype=torch.uint8), E4M3)
    finite = values[values.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 460.0, 1e30, -500.0, 1e-30])
    x = torch.cat([finite, near, special, random(2000, scale=100.0), random(2000, scale=0.01)])
    d = 128
    v = torch.cat([x, x.new_zeros(-len(x) % d)]).view(-1, d)
    cache_rows = torch.arange(len(v), dtype=torch.int32)
    cache = PagedCache(1, 1, d, len(v) // BLOCK_TOKENS + 1, E4M3.name, torch.device("cpu"), 1)
    qkv = torch.cat([torch.zeros(len(v), 2 * d), v], dim=1)
    rotary = torch.zeros(1, 2, d // 2)
    fast.rotate_and_store(qkv, (None, None), 1e-5, rotary, torch.zeros_like(cache_rows), cache_rows, cache, 0)
    written = cache.data[0, :, 1, 0].flatten(0, 1)[: len(v)]
    assert torch.equal(written, encode(v, E4M3))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "element", "dtype", "window"),
    [
        (4, 2, 16, "float32", torch.float32, None),
        (6, 1, 24, "float32", torch.float32, 70),
        (3, 3, 40, "float16", torch.float16, None),
        (4, 2, 16, "float16", torch.float32, 1),
        (4, 2, 16, E4M3.name, torch.float16, None),
        (6, 1, 24, E4M3.name, torch.float32, 70),
        (2, 2, 160, "float16", torch.float16, None),
    ],
)
def test_attention_over_runs_of_keys(
    heads: int,
    kv_heads: int,
    d: int,
    element: str,
    dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if d > 16 or window is not None:  # keys take four runs at most; more programs only take the interpreter longer
        monkeypatch.setattr(fast, "_SPLITS", 8)
    contexts = [1, 64, 200]
    cache = cache_of(kv_heads, d, element)
    width = BLOCKS  # more than any sequence has
    tables = torch.randint(BLOCKS, (len(contexts), width), generator=torch.Generator().manual_seed(1)).int()
    for row, context in enumerate(contexts):  # no block of its own: all may read all that is written
        cache_rows = (
            tables[row, torch.arange(context) // BLOCK_TOKENS] * BLOCK_TOKENS + torch.arange(context) % BLOCK_TOKENS
        )
        cache.write(1, cache_rows, random(context, kv_heads, d, seed=row), random(context, kv_heads, d, seed=row + 50))
    positions = torch.tensor(contexts, dtype=torch.int32) - 1
    q = random(len(contexts), heads, d, seed=9).to(dtype)
    found = fast.attend(q, positions, tables, cache, 1, 0.3, window)
    expected = reference.attend(q, positions, tables, cache, 1, 0.3, window)
    assert not expected.isnan().any()
    torch.testing.assert_close(found, expected, atol=ATOL[dtype], rtol=2e-3 if dtype == torch.float16 else 1e-5)
    assert not cache.counters.any()  # ready for the next launch
    alone = fast.attend(q[2:3], positions[2:3], tables[2:3], cache, 1, 0.3, window)
    assert torch.equal(found[2:3], alone)
