"""The read bandwidth probe: it reads every byte on every instruction set, and refuses invalid arguments."""

from __future__ import annotations

import numpy as np
import pytest

from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.native import STRUCTS
from minifloat.kernels.speed import ReadBandwidth, read_bandwidth

LIBRARY = native.load()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=native.why_unavailable())


@needs_library
@pytest.mark.parametrize("words", [0, 1, 31, 32, 33, 4096, 100_003])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_word_is_read_once_on_every_instruction_set(words: int, threads: int) -> None:
    assert LIBRARY is not None
    data = np.random.default_rng(words).integers(0, 2**64, words + 1, np.uint64)[1:]  # off the vector's alignment
    for isa in LIBRARY.isas:
        args = STRUCTS["read_args"](data=data.ctypes.data, bytes=data.nbytes, threads=threads, sum=1)
        LIBRARY.with_isa(isa).call("read", args)
        assert args.sum == data.sum(dtype=np.uint64), isa


@needs_library
def test_half_a_word_is_refused() -> None:
    assert LIBRARY is not None
    with pytest.raises(ValueError, match="refused its arguments"):
        LIBRARY.call("read", STRUCTS["read_args"](data=np.zeros(2).ctypes.data, bytes=12, threads=1))


@needs_library
def test_the_bandwidth_is_that_of_the_requested_bytes() -> None:
    result = read_bandwidth(1_000_003, threads=2, rounds=3)
    assert (result.bytes, result.threads, len(result.samples)) == (1_000_000, 2, 3)
    assert all(sample > 0 for sample in result.samples)


@needs_library
@pytest.mark.parametrize(("size", "threads", "rounds"), [(7, 1, 1), (64, 0, 1), (64, 1, 0)])
def test_an_empty_measurement_is_refused(size: int, threads: int, rounds: int) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_bandwidth(size, threads, rounds)


def test_the_spread_is_relative_to_the_median() -> None:
    result = ReadBandwidth(8, 1, (9.0, 10.0, 12.0))
    assert (result.median, result.spread) == (10.0, 0.3)
