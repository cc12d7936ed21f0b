"""The status page shows attention's share of the time."""

from __future__ import annotations

from pathlib import Path

from minifloat.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from minifloat.serve.server.metrics import Metrics

STORIES = Path(__file__).parents[3] / "examples" / "storybook-4m"


def test_the_share_of_attention_is_that_of_all_steps() -> None:
    engine = Engine(STORIES, EngineOptions(dtype="float32", max_model_len=128))
    metrics = Metrics(AsyncEngine(engine))
    assert metrics.recent()["attention_share"] is None
    engine.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    seconds = engine.part_seconds()
    assert metrics.recent()["attention_share"] == seconds["attention"] / sum(seconds.values())
    assert 0 < metrics.recent()["attention_share"] < 1


def test_an_engine_that_does_not_measure_has_no_share() -> None:
    engine = Engine(STORIES, EngineOptions(dtype="float32", max_model_len=128, runner="transformers"))
    assert Metrics(AsyncEngine(engine)).recent()["attention_share"] is None
