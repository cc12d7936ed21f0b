"""Measure `quantize_rows` on one thread: every scheme and instruction set, plain torch, and a copy of the bytes.

    python benchmarks/quantize_kernel.py                    # 16 MiB of BF16 weights: a slab, from the cache
    python benchmarks/quantize_kernel.py --mebibytes 1024   # from memory

Every round runs all implementations in turn, so that other load on the machine affects all alike; the best time of each
is printed.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from minifloat.kernels import native
from minifloat.kernels.quantize import amax, quantize_rows
from minifloat.numerics.scheme import SCHEMES

COLUMNS = 4096
BYTES_PER_WEIGHT = 2
#: Plain torch is some hundred times slower, so it quantizes only a part of the weight.
REFERENCE_ROWS = 128

Bytes = npt.NDArray[np.uint8]
Run = tuple[Bytes, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=16, help="size of the BF16 weight (16)")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions, of which the best counts (15)")
    parser.add_argument("--schemes", nargs="*", default=["fp8-block", "fp8", "fp8-static", "mxfp8", "mxfp4", "nvfp4"])
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = weight(options.mebibytes)
    copy = np.empty_like(data)
    library = native.load()
    names = ["copy", "torch", *(library.isas if library else ())]
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread, BF16 {shape_of(data)}")
    print(f"native library: {native.isa()}{native.why_unavailable() and ', ' + native.why_unavailable()}")
    print("\nG elements/s; copy: np.copyto of the BF16 bytes\n")
    print(f"{'':12}" + "".join(f"{name:>12}" for name in names))
    for scheme in [*options.schemes, "amax"]:
        few = data[: REFERENCE_ROWS * COLUMNS * BYTES_PER_WEIGHT]
        runs: list[Run] = [
            (data, partial(np.copyto, copy, data)),
            (few, operation(scheme, few, "reference")),
        ]
        if library:
            runs += [(data, bound(library.with_isa(isa), operation(scheme, data, "cpu"))) for isa in library.isas]
        seconds = best_of([run for _, run in runs], options.rounds)
        rates = [len(source) / BYTES_PER_WEIGHT / s / 1e9 for (source, _), s in zip(runs, seconds, strict=True)]
        print(f"{scheme:12}" + "".join(f"{rate:12.3g}" for rate in rates), flush=True)


def shape_of(data: Bytes) -> tuple[int, int]:
    return len(data) // (COLUMNS * BYTES_PER_WEIGHT), COLUMNS


def weight(mebibytes: int) -> Bytes:
    """Return the BF16 bytes of normally distributed weights with standard deviation 0.02."""
    rows = max(mebibytes * 2**20 // (COLUMNS * BYTES_PER_WEIGHT), 1)
    generator = np.random.default_rng(0)
    bits = np.empty((rows, COLUMNS), np.uint16)
    for start in range(0, rows, 1024):
        part = generator.standard_normal((min(1024, rows - start), COLUMNS), np.float32) * np.float32(0.02)
        bits[start : start + len(part)] = part.view(np.uint32) >> 16
    return bits.view(np.uint8).reshape(-1)


def operation(scheme: str, data: Bytes, impl: str) -> Callable[[], object]:
    """Return a call that writes into existing arrays, as the streaming quantizer does."""
    if scheme == "amax":
        return partial(amax, data, "BF16", shape_of(data), impl=impl)
    spec = SCHEMES[scheme].weight
    run = partial(quantize_rows, data, "BF16", shape_of(data), spec, tensor_amax=0.12, impl=impl)
    result = run()
    return partial(run, out=(result.codes, result.scales))


def bound(library: native.Library, run: Callable[[], object]) -> Callable[[], object]:
    """Return `run` bound to the instruction set of `library`."""

    def on_that_instruction_set() -> object:
        load, native.load = native.load, lambda: library
        try:
            return run()
        finally:
            native.load = load

    return on_that_instruction_set


def best_of(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the shortest time of each run in seconds."""
    best = [float("inf")] * len(runs)
    for _ in range(rounds):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    main()
