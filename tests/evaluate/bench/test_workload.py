"""A batch on the engine: the recorder keeps the times that the engine reports."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from engine_clock import EngineClock

from minifloat.engine import Engine, EngineOptions, StepStats, Timings, TokenUsage
from minifloat.errors import UsageError
from minifloat.evaluate.bench.worker import BatchTimings, run_batch
from minifloat.evaluate.bench.workload import Workload
from minifloat.report.json_values import from_values


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return Engine(
        llama_folder, EngineOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, prefix_cache=False)
    )


class CallRecorder(BatchTimings):
    """A recorder that also keeps the arguments of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def step(self, stats: StepStats) -> None:
        super().step(stats)
        self.calls.append(stats)

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        super().finished(reason, timings, usage)
        self.calls.append((reason, timings, usage))


def test_every_token_of_prompts_and_outputs_is_in_the_steps(engine: Engine) -> None:
    sample = run_batch(engine, Workload(10, 6).prompts(0, 3, 256), 6)
    assert sum(step.prompt_tokens for step in sample.steps) == sample.input_tokens == 30
    assert sum(step.generation_tokens for step in sample.steps) == sample.output_tokens == 18
    assert (len(sample.ttfts), len(sample.itls), len(sample.tpots), len(sample.e2els)) == (3, 15, 3, 3)


def test_the_times_of_a_request_add_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    EngineClock(engine, monkeypatch)
    sample = run_batch(engine, Workload(10, 6).prompts(0, 1, 256), 6)
    assert sample.ttfts == [0.5]  # a prompt of 10 tokens takes two steps of 8
    assert sample.itls == [0.25] * 5
    assert sample.ttfts[0] + sum(sample.itls) == sample.e2els[0] == sample.seconds
    assert sample.tpots[0] == sum(sample.itls) / 5
    assert [step.seconds for step in sample.steps] == [0.25] * 7
    assert sum(step.seconds for step in sample.steps) <= sample.seconds


def test_the_recorder_keeps_the_times_that_the_engine_reports(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CallRecorder()
    monkeypatch.setattr("minifloat.evaluate.bench.worker.BatchTimings", lambda: recorder)
    sample = run_batch(engine, Workload(10, 4).prompts(0, 2, 256), 4)
    stats = [call for call in recorder.calls if isinstance(call, StepStats)]
    assert [step.seconds for step in sample.steps] == [call.seconds for call in stats]
    ended = [call for call in recorder.calls if not isinstance(call, StepStats)]
    assert [reason for reason, _, _ in ended] == ["length", "length"]
    assert sample.e2els == [timings.finished - timings.arrived for _, timings, _ in ended]


def test_the_engines_own_observer_is_restored(engine: Engine) -> None:
    observer = BatchTimings()
    engine.observer = observer
    run_batch(engine, Workload(4, 2).prompts(0, 1, 256), 2)
    assert engine.observer is observer
    assert observer.steps == []
    engine.observer = None


def test_batch_timings_survive_json(engine: Engine) -> None:
    sample = run_batch(engine, Workload(4, 3).prompts(0, 2, 256), 3)
    assert from_values(BatchTimings, json.loads(json.dumps(asdict(sample)))) == sample


def test_prompts_depend_on_round_and_seed_and_are_repeatable() -> None:
    load = Workload(8, 2, seed=3)
    assert load.prompts(1, 2, 256) == Workload(8, 2, seed=3).prompts(1, 2, 256)
    different = [load.prompts(1, 2, 256), load.prompts(2, 2, 256), Workload(8, 2, seed=4).prompts(1, 2, 256)]
    assert len({str(prompts) for prompts in different}) == 3
    assert all(0 <= token < 7 for prompt in load.prompts(0, 4, 7) for token in prompt)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"input_len": 0}, "input_len"),
        ({"output_len": 1}, "output_len"),
        ({"rounds": 0}, "rounds"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"batch_sizes": (1, 1)}, "batch_sizes"),
        ({"batch_sizes": (0,)}, "batch_sizes"),
    ],
)
def test_a_workload_out_of_range_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: "):
        Workload(**values)
