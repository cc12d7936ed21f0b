"""The host's work of a step grows little with the batch: counted in calls, which are the same on every machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from minifloat.engine import Engine, EngineOptions, Request, SamplingParams

STEPS = 20
#: Calls of Python and C functions per sequence and step, by runner and temperature: half as many again as there are.
#: Without a GPU each sequence is sampled by calls of its own.
MOST_CALLS = {("device", 0.0): 70, ("device", 0.8): 75, ("native", 0.0): 80, ("native", 0.8): 150}


def calls(engine: Engine, batch: int, params: SamplingParams) -> int:
    """Functions called in `STEPS` steps in which each sequence gets a token."""
    for index in range(batch):
        engine.add(Request(str(index), tuple(range(20 + index, 30 + index)), params))
    while any(not sequence.output_length for sequence in engine._sequences.values()):
        engine.step()
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        for _ in range(STEPS):
            assert len(engine.step()) == batch
    finally:
        sys.setprofile(None)
    for index in range(batch):
        engine.cancel(str(index))
    return count


@pytest.mark.parametrize("runner", ["device", "native"])
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}], ids=str)
def test_a_sequence_more_costs_few_calls_per_step(runner: str, values: dict[str, float], llama_folder: Path) -> None:
    params = SamplingParams(max_tokens=2 * STEPS, ignore_eos=True, **values)  # type: ignore[arg-type]
    engine = Engine(llama_folder, EngineOptions(dtype="float32", runner=runner, max_num_seqs=16, prefix_cache=False))
    calls(engine, 8, params)  # texts of tokens are decoded once
    few, many = calls(engine, 8, params), calls(engine, 16, params)
    print(f"{(many - few) / 8 / STEPS:.0f} calls per sequence, {(2 * few - many) / STEPS:.0f} per step")
    assert many - few < MOST_CALLS[runner, values["temperature"]] * 8 * STEPS
