"""The figures of `bench`, computed from samples with known results, and the reasons why they are not to be quoted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from minifloat.evaluate.bench.figures import (
    BatchFigures,
    CpuTime,
    EngineFigures,
    GainsReport,
    MachineUse,
    batch_figures,
    decode_seconds,
    metrics,
    prefill_rate,
    spread,
)
from minifloat.evaluate.bench.worker import BatchTimings, EngineStep
from minifloat.evaluate.bench.workload import Workload

# ------------------------------------------------------------------------------------------------- figures


INFO = {"step_bytes": 1000, "kv_bytes_per_token": 25}
#: Two prompts of 8 tokens, computed in chunks; the first sequence decodes in the same step as the second's last chunk.
SAMPLE = BatchTimings(
    seconds=1.0,
    steps=[
        EngineStep(6, 0, 0.2),
        EngineStep(4, 1, 0.2),
        EngineStep(6, 2, 0.15),
        EngineStep(0, 2, 0.1),
        EngineStep(0, 2, 0.12),
        EngineStep(0, 1, 0.05),
    ],
    ttfts=[0.4, 0.55],
    itls=[0.15, 0.1, 0.12, 0.1, 0.12, 0.05],
    tpots=[0.12, 0.09],
    e2els=[0.77, 0.82],
    input_tokens=16,
    output_tokens=8,
)


def test_the_decode_step_is_one_in_which_all_sequences_get_a_token_and_no_prompt_is_computed() -> None:
    assert decode_seconds(SAMPLE, 2) == pytest.approx(0.11)
    assert decode_seconds(SAMPLE, 1) == 0.05
    assert decode_seconds(SAMPLE, 3) is None


def test_with_drafts_it_is_the_mean_time_of_a_token_of_each() -> None:
    steps = [
        EngineStep(6, 2, 0.3),
        EngineStep(0, 6, 0.12, draft_tokens=8),
        EngineStep(0, 2, 0.08),
        EngineStep(0, 4, 0.12, draft_tokens=6),
        EngineStep(0, 1, 0.05),  # one sequence has ended
    ]
    assert decode_seconds(replace(SAMPLE, steps=steps), 2) == pytest.approx((0.12 + 0.08 + 0.12) / 6)


def test_prefill_ends_when_the_first_sequence_decodes() -> None:
    assert prefill_rate(SAMPLE) == pytest.approx(10 / 0.4)


def test_throughput_is_over_all_rounds() -> None:
    figures = metrics([SAMPLE, SAMPLE])
    assert figures["duration"] == 2.0
    assert figures["completed"] == 4
    assert figures["request_throughput"] == 2.0
    assert figures["output_throughput"] == 8.0
    assert figures["total_token_throughput"] == 24.0
    assert figures["mean_ttft_ms"] == pytest.approx(475)
    assert figures["median_itl_ms"] == pytest.approx(110)


@pytest.mark.parametrize("name", ["ttft", "tpot", "itl", "e2el"])
def test_latencies_have_the_names_of_vllms_benchmark(name: str) -> None:
    assert {f"{statistic}_{name}_ms" for statistic in ("mean", "median", "std", "p99")} <= metrics([SAMPLE]).keys()


def test_the_bound_is_the_time_to_read_the_bytes_of_a_step() -> None:
    # 1000 bytes of weights and 2 sequences of 8 .. 12 tokens, 10 on average, of 25 bytes each.
    figures = batch_figures([SAMPLE], 2, Workload(8, 4), INFO, [15_000.0])
    assert figures.bound_ms == (100.0,)
    assert figures.bandwidth_share == pytest.approx(100 / 110)
    assert figures.bound_throughput == pytest.approx(20.0)
    assert figures.decode_throughput == pytest.approx(2 / 0.11)


def test_without_a_bandwidth_or_a_pure_decode_step_there_is_no_bandwidth_share() -> None:
    assert batch_figures([SAMPLE], 2, Workload(8, 4), INFO, []).bandwidth_share is None
    mixed = batch_figures([SAMPLE], 3, Workload(8, 4), INFO, [1.0])
    assert mixed.bandwidth_share is None
    assert mixed.decode_throughput is None
    assert mixed.to_dict()["decode_step_ms_spread"] is None


# ------------------------------------------------------------------------------------------------- doubts


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
