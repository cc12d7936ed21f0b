"""Turn the samples of `benchmarks/linear.py` and `benchmarks/moe.py` into rows, a table and a record for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from linear_shapes import BASELINE
from timing import ratio, spread

READ = "memory read"


@dataclass(frozen=True)
class Case:
    """The samples of one shape ``(N, K)`` and M: seconds per call of each contender, one value per round."""

    name: str
    shape: tuple[int, int]
    m: int
    nbytes: dict[str, int]
    samples: dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One line of the table: medians over the rounds.

    Attributes:
        seconds: Seconds per call.
        spread: Interquartile range over the median.
        faster: Speed over that of torch BF16; None for memory reading.
        read: Share of the bandwidth at which memory was read in the same rounds; None if that was not measured.
        gflops: 2 M N K over the time, in 1e9 per second; 0 for memory reading.
        gbytes: Bytes of the weight over the time, in 1e9 per second.
    """

    contender: str
    seconds: float
    spread: float
    faster: float | None
    read: float | None
    gflops: float
    gbytes: float


def rows_of(case: Case) -> list[Row]:
    """Return the lines of a case, in the order of its contenders; ratios are taken round by round."""
    rows = []
    flops = 2 * case.m * case.shape[0] * case.shape[1]
    for name, samples in case.samples.items():
        seconds, nbytes = statistics.median(samples), case.nbytes[name]
        read = ratio(case.samples[READ], samples) * nbytes / case.nbytes[READ] if READ in case.samples else None
        faster = None if name == READ else ratio(case.samples[BASELINE], samples)
        rate = 0.0 if name == READ else flops / seconds / 1e9
        rows.append(Row(name, seconds, spread(samples), faster, read, rate, nbytes / seconds / 1e9))
    return rows


HEADER = f"{'M':>5} {'':<22} {'us':>10} {'+-%':>4} {'x torch':>8} {'GB/s':>6} {'read%':>5} {'GFLOP/s':>8} {'peak%':>5}"


def line(m: int, row: Row, peak: float) -> str:
    """Return a row as text under `HEADER`; `peak` is the best rate of torch in GFLOP/s; ! marks what is slower."""
    read = f"{row.gbytes:6.1f} {row.read * 100:5.0f}" if row.read is not None else f"{'':6} {'':5}"
    rate = f"{row.gflops:8.0f} {row.gflops / peak * 100:5.0f}" if row.gflops else ""
    faster = "" if row.faster is None else f"{row.faster:.2f}{'!' if row.faster < 1 else ' '}"
    text = f"{m:>5} {row.contender:<22} {row.seconds * 1e6:10.1f} {row.spread * 100:4.0f} {faster:>8} {read} {rate}"
    return text.rstrip()


def record(case: Case, rows: Sequence[Row]) -> dict[str, object]:
    """Return a case with all its samples, for JSON."""
    contenders = [
        {**asdict(row), "weight_bytes": case.nbytes[row.contender], "samples": case.samples[row.contender]}
        for row in rows
    ]
    return {"shape": case.name, "n": case.shape[0], "k": case.shape[1], "m": case.m, "contenders": contenders}
