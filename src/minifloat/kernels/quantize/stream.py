"""Casts and copies of weights from file to file by the native library (``csrc/quantize/stream.cpp``).

One call reads a weight a slab at a time, hashes it, casts it and writes the codes, all while the slab is in the cache,
and without the interpreter lock. `minifloat.quantize.stream` does the same slab by slab where this module cannot.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.files import Place, storage_errors, truncated
from minifloat.kernels import native
from minifloat.kernels.native import structs
from minifloat.kernels.quantize import cpu
from minifloat.kernels.quantize.slab import Slab
from minifloat.numerics.cast_stats import CastStats

#: ``enum minifloat_stream_kind``.
_CAST, _COPY, _COPY_FINITE = 0, 1, 2
#: ``enum minifloat_stream_failure``.
_CANNOT_READ, _ENDED = 1, 2


@dataclass(frozen=True)
class Streamed:
    """The result of a cast or a copy.

    Attributes:
        digest: BLAKE3 of the source's bytes, hexadecimal.
        stats: Error of the cast; ``CastStats()`` for a copy.
        nonfinite: Number of NaN and Inf that were found; the work stopped at the slab that has them.
        first_row: First row of that slab, for a cast.
        last_row: Its last row.
    """

    digest: str
    stats: CastStats
    nonfinite: int
    first_row: int
    last_row: int


def quantize_file(slab: Slab, source: Place, target: Place) -> Streamed:
    """Quantize a weight of a file and write its codes to another file.

    Args:
        slab: The whole weight; its `data` and `codes` are not used, its `scales` are filled.
        source: Where the weight begins.
        target: Where its codes begin.

    Raises:
        StorageError: The operating system refused to read or write, or the source ends early.
        KernelUnavailable: There is no native library.
    """
    args = structs.StreamArgs(cast=cpu.arguments(slab), kind=_CAST)
    digest = _run(args, source, target)
    stats = CastStats(
        slab.shape[0] * slab.shape[1], args.cast.signal, args.cast.noise, args.cast.saturated, args.cast.flushed
    )
    return Streamed(digest, stats, args.cast.nonfinite, args.first_row, args.last_row)


def copy_file(nbytes: int, dtype: str | None, source: Place, target: Place) -> Streamed:
    """Copy bytes from one file to another.

    Args:
        nbytes: Number of bytes.
        dtype: ``"BF16"``, ``"F16"`` or ``"F32"`` to stop at NaN and Inf; None to copy any bits.
        source: Where the bytes begin.
        target: Where they go.

    Raises:
        StorageError: The operating system refused to read or write, or the source ends early.
        KernelUnavailable: There is no native library.
    """
    args = structs.StreamArgs(kind=_COPY if dtype is None else _COPY_FINITE, bytes=nbytes)
    if dtype is not None:
        args.cast.dtype = cpu.DTYPES[dtype]
    digest = _run(args, source, target)
    return Streamed(digest, CastStats(), args.cast.nonfinite, 0, 0)


def blake3(data: npt.NDArray[np.uint8], hasher: structs.Blake3 | None = None) -> str:
    """Return the BLAKE3 of the bytes added to a hasher so far, those of `data` included, hexadecimal."""
    state = structs.Blake3() if hasher is None else hasher
    library = native.require()
    library.blake3_update(state, data.ctypes.data, data.nbytes)
    return library.blake3_finish(state).hex()


def _run(args: structs.StreamArgs, source: Place, target: Place) -> str:
    """Run the library and return the digest of the source."""
    hasher = structs.Blake3()
    args.source, args.source_offset = source.descriptor, source.offset
    args.target, args.target_offset = target.descriptor, target.offset
    args.source_hash = ctypes.pointer(hasher)
    library = native.require()
    library.stream(args)
    if args.failed == _ENDED:
        raise truncated(source.path, args.position, args.missing)
    if args.failed:
        reading = args.failed == _CANNOT_READ
        with storage_errors(source.path if reading else target.path, "read" if reading else "write"):
            raise OSError(args.error, os.strerror(args.error))
    return library.blake3_finish(hasher).hex()
