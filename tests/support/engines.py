"""What tests of engines share: prompts, answers, an observer, devices."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from minifloat.engine import Delivery, Engine, Request, SamplingParams, StepStats, Timings, TokenUsage

LENGTH = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")),
    ],
)


def prompts_of(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [tuple(generator.randrange(250) for _ in range(generator.randint(low, high))) for _ in range(count)]


def tokens(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(completion.tokens) for completion in engine.generate(prompts, params)]


def collect(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = GREEDY) -> dict[str, Delivery]:
    """Run requests, named by their places, and return the whole delivery of each."""
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, params))
    return run(engine)


def run(engine: Engine) -> dict[str, Delivery]:
    """Step until nothing is left, and return the whole delivery of each request."""
    parts: dict[str, list[Delivery]] = {}
    while engine.has_work:
        for delivery in engine.step():
            parts.setdefault(delivery.request_id, []).append(delivery)
    return {name: Delivery.joined(deliveries) for name, deliveries in parts.items()}


class Recorder:
    """A listener that keeps what it receives."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self.first: list[float] = []
        self.between: list[float] = []
        self.ends: list[tuple[str, Timings, TokenUsage]] = []

    @property
    def preemptions(self) -> int:
        return sum(step.preemptions for step in self.steps)

    def step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def token(self, since_previous: float) -> None:
        self.between.append(since_previous)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        self.ends.append((reason, timings, usage))


def fail_and_poison(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps with request "2" fail, and the logits of request "1" be NaN."""
    run_model = engine._runner.run

    def failing(works: Any) -> Any:
        names = [work.sequence.request_id for work in works]
        if "2" in names:
            raise RuntimeError("injected")
        logits = run_model(works).clone()
        sampled = [work.sequence.request_id for work in works if work.samples]
        if "1" in sampled:
            logits[sampled.index("1"), 3] = float("nan")
        return logits

    monkeypatch.setattr(engine._runner, "run", failing)
