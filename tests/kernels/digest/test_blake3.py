"""BLAKE3 of the native library against the blake3 package, for every instruction set that this processor has."""

from __future__ import annotations

import numpy as np
import pytest

from minifloat.kernels import native
from minifloat.kernels.native import structs
from minifloat.kernels.quantize.stream import blake3

package = pytest.importorskip("blake3")
pytestmark = pytest.mark.skipif(native.load() is None, reason="no native library")

#: Sizes around blocks of 64 bytes, chunks of 1 KiB and the 256 chunks that are hashed together.
SIZES = [
    *(0, 1, 63, 64, 65, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 4096, 5000, 8192, 16384, 16385, 31744),
    *(262143, 262144, 262145, 300000, 524288, 524289, 786432, 1048576, 1234567),
]


def isas() -> tuple[str, ...]:
    library = native.load()
    return () if library is None else library.isas


@pytest.fixture(scope="module")
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, max(SIZES), dtype=np.uint8)


@pytest.mark.parametrize("isa", isas())
def test_every_size_has_the_hash_of_the_package(isa, data):
    with native.using(isa):
        for size in SIZES:
            assert blake3(data[:size]) == package.blake3(data[:size]).hexdigest(), size


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("piece", [1000, 1024, 4096, 100_000, 262_144, 300_000])
def test_pieces_have_the_hash_of_the_whole(isa, piece, data):
    with native.using(isa):
        hasher = structs.Blake3()
        digest = ""
        for start in range(0, data.size, piece):
            digest = blake3(data[start : start + piece], hasher)
    assert digest == package.blake3(data).hexdigest()


def test_a_hash_can_be_read_before_more_bytes_follow(data):
    hasher = structs.Blake3()
    for stop in (0, 70, 1024, 4096, 70_000):
        start = hasher.chunks * 1024 + hasher.buffered
        assert blake3(data[start:stop], hasher) == package.blake3(data[:stop]).hexdigest()
