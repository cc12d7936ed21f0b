"""The figures of `bench`, computed from samples with known results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minifloat.evaluate.bench.figures import batch_figures, decode_seconds, metrics, prefill_rate
from minifloat.evaluate.bench.worker import BatchTimings, EngineStep
from minifloat.evaluate.bench.workload import Workload

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
