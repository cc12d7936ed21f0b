"""Turn the samples of `benchmarks/linear.py` into rows, tables and a record for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from linear_bars import (
    BASELINE,
    FORMATS,
    NEVER_BELOW_BASELINE,
    NEVER_BELOW_NEXT,
    NEXT_LARGER,
    Verdict,
    bars,
    describe,
    judge,
)
from timing import ratio, spread

FP32 = "torch FP32"
READ = "memory read"


@dataclass(frozen=True)
class Case:
    """The samples of one shape and M.

    Attributes:
        name: Name of the shape.
        shape: ``(N, K)``.
        m: Rows of the input.
        nbytes: Contender -> bytes of one weight.
        samples: Contender -> seconds per call, one value per round.
    """

    name: str
    shape: tuple[int, int]
    m: int
    nbytes: dict[str, int]
    samples: dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        shape: Name of the shape.
        m: Rows of the input.
        contender: Name of the contender.
        seconds: Median seconds per call.
        spread: Interquartile range over the median.
        measured: Quantity of `linear_bars.Bar` -> value: "x torch"; "read" if memory reading was measured; "x next" if
            there is a next larger format.
        gflops: 2 M N K over the time, in 1e9 per second; 0 for `READ`.
        gbytes: Bytes of the weight over the time, in 1e9 per second.
        held_to: The bars as text; empty for peers.
        verdict: The verdict; None for peers.
    """

    shape: str
    m: int
    contender: str
    seconds: float
    spread: float
    measured: dict[str, float]
    gflops: float
    gbytes: float
    held_to: str
    verdict: Verdict | None


def rows_of(case: Case, isa: str, rules_only: bool = False) -> list[Row]:
    """Return the lines of a case, in the order in which its contenders were measured.

    Args:
        case: Samples of the baseline and other contenders; if `READ` is among them, the shares of the bandwidth are
            computed round by round.
        isa: Instruction set of our kernels, which decides the bars that apply.
        rules_only: Apply only the two rules, not the bars of a linear with that M.
    """
    rows = []
    for name, samples in case.samples.items():
        seconds = statistics.median(samples)
        gbytes = case.nbytes[name] / seconds / 1e9
        measured = {} if name == READ else {"x torch": ratio(case.samples[BASELINE], samples)}
        if READ in case.samples:
            measured["read"] = ratio(case.samples[READ], samples) * case.nbytes[name] / case.nbytes[READ]
        larger = NEXT_LARGER.get(name)
        if larger in case.samples:
            measured["x next"] = ratio(case.samples[larger], samples)
        flops = 0 if name == READ else 2 * case.m * case.shape[0] * case.shape[1]
        held_to = bars(name, None if rules_only else case.m, isa)
        rows.append(
            Row(
                case.name, case.m, name, seconds, spread(samples), measured, flops / seconds / 1e9, gbytes,
                describe(held_to), judge(held_to, measured),
            )
        )  # fmt: skip
    return rows


HEADER = (
    f"{'M':>5} {'':<22} {'us':>10} {'+-%':>4} {'x torch':>8} {'GB/s':>6} {'read%':>5} {'GFLOP/s':>8} {'peak%':>5} "
    f"{'x next':>7}  {'floor/aim':<16} verdict"
)


def line(row: Row, peak: float) -> str:
    """Return `row` as text under `HEADER`; `peak` is the best rate of torch BF16 in GFLOP/s."""
    read = f"{row.gbytes:6.1f} {row.measured['read'] * 100:5.0f}" if "read" in row.measured else f"{'':6} {'':5}"
    rate = f"{row.gflops:8.0f} {row.gflops / peak * 100:5.0f}" if row.gflops else f"{'':8} {'':5}"
    faster, larger = (_times(row, quantity) for quantity in ("x torch", "x next"))
    verdict = "" if row.verdict is None else str(row.verdict)
    return (
        f"{row.m:>5} {row.contender:<22} {row.seconds * 1e6:10.1f} {row.spread * 100:4.0f} "
        f"{faster:>8} {read} {rate} {larger:>7}  {row.held_to:<16} {verdict}"
    ).rstrip()


def _times(row: Row, quantity: str) -> str:
    return f"{row.measured[quantity]:.2f}" if quantity in row.measured else ""


def summary(rows: Sequence[Row], isa: str) -> list[str]:
    """Return the table of the bars over all shapes, then the tables of the two rules over all M."""
    return [*_bars_table(rows, isa), "", *_rules_table(rows)]


def misses(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that miss a floor, the worst first."""
    short = [row for row in rows if row.verdict is not None and row.verdict.word == "short"]
    return sorted(short, key=lambda row: -row.verdict.short if row.verdict else 0.0)


def record(case: Case, rows: Sequence[Row]) -> dict[str, object]:
    """Return a case with all its samples, for JSON."""
    return {
        "shape": case.name,
        "n": case.shape[0],
        "k": case.shape[1],
        "m": case.m,
        "contenders": [
            {
                **{key: value for key, value in asdict(row).items() if key not in ("shape", "m", "verdict")},
                "weight_bytes": case.nbytes[row.contender],
                "samples": case.samples[row.contender],
                "verdict": None if row.verdict is None else row.verdict.word,
                "short": None if row.verdict is None else row.verdict.short,
                "short_in": None if row.verdict is None else row.verdict.quantity,
            }
            for row in rows
        ],
    }


def _bars_table(rows: Sequence[Row], isa: str) -> list[str]:
    lines = [
        f"{'over all shapes':<24} {'M':>5} {'worst':>7} {'median':>7} {'best':>7} {'floor':>6} {'aim':>6}  verdict"
    ]
    for name in FORMATS:
        ours = [row for row in rows if row.contender == name]
        for m in sorted({row.m for row in ours}):
            for bar in bars(name, m, isa):
                values = [row.measured[bar.quantity] for row in ours if row.m == m and bar.quantity in row.measured]
                if bar.aim is None or not values:
                    continue
                worst = min(values)
                lines.append(
                    f"{name:<14} {bar.quantity:<9} {m:>5} {worst:7.2f} {statistics.median(values):7.2f} "
                    f"{max(values):7.2f} {bar.floor:6.2f} {bar.aim:6.2f}  {judge((bar,), {bar.quantity: worst})}"
                )
    return lines if len(lines) > 1 else [f"no bars of the issue apply to {isa} here; the two rules do"]


def _rules_table(rows: Sequence[Row]) -> list[str]:
    ms = sorted({row.m for row in rows})
    lines = []
    tables = (
        ("x torch", f"x {BASELINE}, the worst shape (never below {NEVER_BELOW_BASELINE:g})", NEVER_BELOW_BASELINE),
        ("x next", f"x our next larger format, the worst shape (never below {NEVER_BELOW_NEXT:g})", NEVER_BELOW_NEXT),
    )
    for quantity, title, floor in tables:
        judged = []
        for name in [*FORMATS, *([FP32] if quantity == "x torch" else [])]:
            cells = []
            for m in ms:
                measured = [row.measured for row in rows if row.contender == name and row.m == m]
                values = [quantities[quantity] for quantities in measured if quantity in quantities]
                mark = "!" if values and name in FORMATS and min(values) < floor else " "
                cells.append(f"{min(values):7.2f}{mark}" if values else f"{'-':>7} ")
            if any("-" not in cell for cell in cells):
                judged.append(f"{name:<24}" + "".join(cells))
        if judged:
            head = f"{'M':<24}" + "".join(f"{m:>8}" for m in ms)
            lines += [f"{title}; ! marks what is below", head, *judged, ""]
    return lines[:-1]
