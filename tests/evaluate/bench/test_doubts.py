"""A run of `bench` that is disturbed, too short or impossible says that it is not to be quoted."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from minifloat.evaluate.bench.figures import BatchFigures, CpuTime, EngineFigures, GainsReport, MachineUse, spread
from minifloat.evaluate.bench.workload import Workload

QUIET = MachineUse(others=0.01, stolen=0.0)


def engine(step_bytes: int, decode_ms: tuple[float, ...], share: float = 0.8) -> EngineFigures:
    info: dict[str, Any] = {"step_bytes": step_bytes, "kv_bytes_per_token": 0}
    figures = BatchFigures(1, decode_ms, tuple(share * ms for ms in decode_ms), (100.0,) * len(decode_ms), {})
    return EngineFigures(info, 0.1, (0.1,), 1, 1, {1: figures}, None)


def report(before: EngineFigures, after: EngineFigures, use: MachineUse | None = QUIET) -> GainsReport:
    rounds = len(before.batches[1].decode_ms)
    load = Workload(input_len=8, output_len=4, batch_sizes=(1,), rounds=rounds)
    return GainsReport(
        "2026-11-23", {}, load, (1e9,) * rounds, together=True, baseline=before, candidate=after, use=use
    )


BASELINE = engine(200, (10.0, 10.1, 9.9))


def test_a_quiet_run_with_a_gain_that_its_bytes_explain_has_no_doubts() -> None:
    assert report(BASELINE, engine(100, (5.1, 5.2, 5.2))).doubts == ()
    assert report(BASELINE, engine(100, (5.1, 5.2, 5.2)), use=None).doubts == ()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (report(BASELINE, engine(100, (5.1, 5.2, 5.2)), MachineUse(0.2, 0.0)), "Other processes used 20%"),
        (report(BASELINE, engine(100, (5.1, 5.2, 5.2)), MachineUse(0.0, 0.1)), "The hypervisor gave 10%"),
        (report(engine(200, (10.0,)), engine(100, (5.2,))), "One round has no spread"),
        (report(BASELINE, engine(100, (5.1, 6.0, 5.2))), "differ by more than 15%: candidate 17%"),
        (report(BASELINE, engine(100, (4.0, 4.1, 4.1))), "a gain of 2.46x is more than the 2.00x fewer bytes"),
        (report(BASELINE, engine(100, (5.1, 5.2, 5.2), share=1.2)), "the candidate reads at 120% of the measured"),
    ],
)
def test_each_reason_is_named(found: GainsReport, words: str) -> None:
    assert len(found.doubts) == 1
    assert words in found.doubts[0]


def test_one_value_has_no_spread() -> None:
    assert spread([5.0]) is None
    assert spread([]) is None
    assert spread([4.0, 6.0]) == pytest.approx(0.4)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' counters of CPU time")
def test_the_work_of_a_measured_process_is_its_own() -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        without, measured = CpuTime.now(()), CpuTime.now((other.pid,))
        other.communicate(b"\n")
    assert without is not None
    assert measured is not None
    assert measured.own - without.own > 0.15


def test_what_is_not_the_own_work_is_that_of_others() -> None:
    use = MachineUse.between(CpuTime(10.0, 5.0, 0.0, 4.0), CpuTime(20.0, 12.0, 1.0, 9.0))
    assert use is not None
    assert (use.others, use.stolen) == pytest.approx((0.2, 0.1))
