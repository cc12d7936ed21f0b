"""Properties of every product: the same bits on any number of threads, fused weights, and any valid shape."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    ISAS,
    KINDS,
    LIBRARY,
    Kernels,
    Packed,
    assert_close,
    bits,
    fits,
    make,
    product,
)

M = (1, 5, 16, 33, 130)
THREADS = (2, 3, 7)
#: Of four bits: enough for each of seven threads to be worth its start (``kBytesPerThread`` of linear.cpp).
ROWS, COLS = 610, 800

kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def inputs(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(5)).to(dtype)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(kernels: Kernels, kind: str, dtype: torch.dtype) -> None:
    packed = kernels.pack(make(kind, ROWS, COLS))
    for m in M:
        x = inputs(m, COLS, dtype)
        expected = bits(kernels.linear(x, packed))
        for threads in THREADS:
            assert torch.equal(bits(kernels.linear(x, packed, threads=threads)), expected)


@kinds
def test_rows_of_a_long_input_have_the_bits_of_its_parts(kernels: Kernels, kind: str) -> None:
    x, weights = inputs(1000, COLS), [kernels.pack(make(kind, n, COLS, seed=n)) for n in (100, 33)]
    expected = torch.cat([bits(kernels.linear(part, weights)) for part in x.split(250)])
    for threads in (1, 2, 7):
        assert torch.equal(bits(kernels.linear(x, weights, threads=threads)), expected)


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_weights_in_one_call_give_the_bits_of_single_calls(
    kernels: Kernels, kind: str, dtype: torch.dtype
) -> None:
    rows = (100, 33, 1, 64)
    weights = [kernels.pack(make(kind, n, 260, seed=n)) for n in rows]
    for m, bias_dtype in itertools.product(M, (torch.bfloat16, torch.float32)):
        biases = [None if n == 33 else inputs(1, n, bias_dtype)[0] for n in rows]
        x = inputs(m, 260, dtype)
        single = [kernels.linear(x, w, [b]) for w, b in zip(weights, biases, strict=True)]
        for threads in (1, 3):
            result = kernels.linear(x, weights, biases, threads)
            assert torch.equal(bits(result), bits(torch.cat(single, dim=1)))


@kinds
def test_a_row_of_x_has_the_same_bits_alone_and_among_others(kernels: Kernels, kind: str) -> None:
    packed = kernels.pack(make(kind, 100, 260))
    for m in M:
        x = inputs(m, 260).clone()
        expected = bits(kernels.linear(x, packed))
        row = m // 3
        others = torch.arange(m) != row
        x[row] = torch.nan
        assert torch.equal(bits(kernels.linear(x, packed))[others], expected[others])


@kinds
def test_concurrent_calls_do_not_affect_each_other(kernels: Kernels, kind: str) -> None:
    shapes = [(300, 400), (100, 260), (33, 1030), (257, 64)]
    weights = [kernels.pack(make(kind, *shape)) for shape in shapes]
    expected = [[bits(kernels.linear(inputs(m, w.stored.shape[1]), w)) for m in M] for w in weights]

    def call(index: int) -> bool:
        weight = weights[index]
        return all(
            torch.equal(bits(kernels.linear(inputs(m, weight.stored.shape[1]), weight, threads=2)), wanted)
            for _ in range(2)
            for m, wanted in zip(M, expected[index], strict=True)
        )

    with ThreadPoolExecutor(len(shapes)) as pool:
        assert all(pool.map(call, range(len(shapes))))


FORK = """
import os, sys, torch
from kernel_cases import Kernels, bits, make
for isa in sys.argv[1:]:  # each in a fork of a process that has not computed yet
    first = os.fork()
    if not first:
        break
    assert os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) == 0, isa
else:
    sys.exit()
kernels = Kernels(isa)
packed = {kind: kernels.pack(make(kind, 610, 800)) for kind in ("fp8-block-128", "mxfp4", "bf16")}
cases = [(kind, torch.randn(m, 800).bfloat16()) for kind in packed for m in (1, 16, 130)]
def results():
    return [bits(kernels.linear(x, packed[kind], threads=2)) for kind, x in cases]
expected = results()
def check():
    return all(torch.equal(a, b) for a, b in zip(results(), expected))
for generation in range(2):  # a child, and a child of it
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        good = check() and os.waitstatus_to_exitcode(status) == 0
        os._exit(0 if good else 1)
os._exit(0 if check() else 1)
"""


@pytest.mark.skipif(LIBRARY is None, reason="no native library")
def test_a_forked_child_computes_and_its_parent_goes_on() -> None:
    paths = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", FORK, *ISAS],
        # One thread for torch itself: its own operators hang in a forked child once OpenMP has started threads.
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(LIBRARY is None, reason="no native library")
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_shape_dtype_and_format(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    rows = [data.draw(st.integers(1, 150)) for _ in range(data.draw(st.integers(1, 3)))]
    cols = data.draw(st.integers(1, 400).filter(lambda cols: fits(kind, cols)))
    m, distance = data.draw(st.integers(1, 140)), data.draw(st.integers(0, 40))
    dtype, bias_dtype = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    threads = data.draw(st.integers(1, 4))
    seed = data.draw(st.integers(0, 1000))
    random = torch.Generator().manual_seed(seed)
    memory = torch.randn(m, cols + distance, generator=random).to(dtype)
    x = memory[:, :cols]
    stored = [make(kind, n, cols, seed + i) for i, n in enumerate(rows)]
    biases = [torch.randn(n, generator=random).to(bias_dtype) if data.draw(st.booleans()) else None for n in rows]
    for isa in ISAS:
        kernels = Kernels(isa)
        weights: list[Packed] = [kernels.pack(weight) for weight in stored]
        result = kernels.linear(x, weights, biases, threads)
        for part, weight, bias in zip(result.split(rows, dim=1), stored, biases, strict=True):
            values = weight.values()
            assert_close(part, product(x, values, bias), x, values)


#: Numbers of rows on both sides of every limit of `csrc/linear/choose.cpp`.
INVARIANT_ROWS = (*range(2, 18), 25, 48, 49, 64, 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_batch_invariant_product_has_the_same_bits_alone(
    kernels: Kernels, kind: str, dtype: torch.dtype
) -> None:
    packed = kernels.pack(make(kind, 70, 672))
    x = torch.randn(max(INVARIANT_ROWS), 672, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([kernels.linear(row[None], packed, batch_invariant=True) for row in x])
    for rows in INVARIANT_ROWS:
        for threads in (1, 2):
            together = kernels.linear(x[:rows], packed, threads=threads, batch_invariant=True)
            assert torch.equal(bits(together), bits(alone[:rows])), f"{rows} rows, {threads} threads"
