"""The metrics of drafts."""

from __future__ import annotations

from pathlib import Path

from minifloat.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from minifloat.serve.server.metrics import Metrics

STORIES = Path(__file__).parents[3] / "examples" / "storybook-4m"
COUNTERS = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
)


def test_counts_of_drafts_are_named_as_in_vllm_and_equal_those_of_the_engine() -> None:
    engine = Engine(STORIES, EngineOptions(dtype="float32", max_model_len=128, speculate="self", draft_tokens=3))
    assert engine.speculator is not None
    engine.speculator._fixed = True
    metrics = Metrics(AsyncEngine(engine))
    engine.observer = metrics
    engine.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stats = (engine.speculator.stats + engine.speculator.last).to_dict()
    text = metrics.text().decode()
    for name in COUNTERS:
        assert stats[name] > 0
        assert f"minifloat_spec_decode_{name}_total {stats[name]:.1f}" in text
    for position, accepted in enumerate(stats["num_accepted_tokens_per_pos"]):
        line = f'minifloat_spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {accepted:.1f}'
        assert line in text
    shown = metrics.recent()["speculation"]
    assert shown["tokens_per_step"] > 1


def test_an_engine_without_drafts_has_no_such_metrics() -> None:
    metrics = Metrics(AsyncEngine(Engine(STORIES, EngineOptions(dtype="float32", max_model_len=128))))
    assert "spec_decode" not in metrics.text().decode()
    assert metrics.recent()["speculation"] is None
