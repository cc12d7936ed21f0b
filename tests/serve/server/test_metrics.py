"""Metrics: what Prometheus reads, drafts, and attention's share of the time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engine_clock import EngineClock
from prometheus_client.parser import text_string_to_metric_families
from serving import running

from minifloat.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from minifloat.serve.server.metrics import Metrics

STORIES = Path(__file__).parents[3] / "examples" / "storybook-4m"


def open_engine(**options: Any) -> Engine:
    return Engine(STORIES, EngineOptions(dtype="float32", max_model_len=128, **options))


def test_prometheus_reads_metrics_with_vllms_names_that_add_up(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    EngineClock(tiny, monkeypatch)
    with running(tiny) as client:
        usage = [client.complete(f"prompt {i}", max_tokens=9, ignore_eos=True).json["usage"] for i in range(5)]
        assert client.complete("y", max_tokens=2, stop="nothing").status == 200
        answer = client.get("/metrics")
        status = client.get("/status").json["now"]
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    gauges = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_bytes", "weight_bytes"}
    counters = {"prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions"}
    counters |= {"request_success", "admission_rejections"}
    histograms = {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    }
    for kind, names in (("gauge", gauges), ("counter", counters), ("histogram", histograms)):
        for name in names:
            assert families[f"minifloat_{name}"].type == kind, name
    assert families["minifloat_decode_bandwidth_bytes_per_second"].samples[0].value > 0

    def total(name: str, suffix: str = "_total") -> float:
        samples = families[f"minifloat_{name}"].samples
        return sum(sample.value for sample in samples if sample.name.endswith(suffix))

    assert total("generation_tokens") == sum(answer["completion_tokens"] for answer in usage) + 2
    assert total("request_success") == 6
    assert total("e2e_request_latency_seconds", "_count") == 6
    assert total("time_to_first_token_seconds", "_count") == 6
    assert total("request_queue_time_seconds", "_count") == 6
    assert total("inter_token_latency_seconds", "_count") == 5 * 8 + 1
    prefill, decode = (total(f"request_{name}_time_seconds", "_sum") for name in ("prefill", "decode"))
    assert prefill + decode <= total("e2e_request_latency_seconds", "_sum")
    itl = total("inter_token_latency_seconds", "_sum")
    assert itl == 0.25 * (5 * 8 + 1)
    assert math.isclose(itl, decode, rel_tol=1e-9)
    assert status["itl_ms"]["median"] <= 1e3 * itl


def test_counts_of_drafts_are_named_as_in_vllm_and_equal_those_of_the_engine() -> None:
    engine = open_engine(speculate="self", draft_tokens=3)
    assert engine.speculator is not None
    engine.speculator._fixed = True
    metrics = Metrics(AsyncEngine(engine))
    engine.observer = metrics
    engine.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stats = (engine.speculator.stats + engine.speculator.last).to_dict()
    text = metrics.text().decode()
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert stats[name] > 0
        assert f"minifloat_spec_decode_{name}_total {stats[name]:.1f}" in text
    for position, accepted in enumerate(stats["num_accepted_tokens_per_pos"]):
        line = f'minifloat_spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} {accepted:.1f}'
        assert line in text
    shown = metrics.recent()["speculation"]
    assert shown["tokens_per_step"] > 1


def test_the_share_of_attention_is_that_of_all_steps_and_without_drafts_there_are_no_such_metrics() -> None:
    engine = open_engine()
    metrics = Metrics(AsyncEngine(engine))
    assert "spec_decode" not in metrics.text().decode()
    assert (metrics.recent()["attention_share"], metrics.recent()["speculation"]) == (None, None)
    engine.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    seconds = engine.part_seconds()
    assert metrics.recent()["attention_share"] == seconds["attention"] / sum(seconds.values())
    assert 0 < metrics.recent()["attention_share"] < 1


def test_an_engine_that_does_not_measure_has_no_share() -> None:
    assert Metrics(AsyncEngine(open_engine(runner="transformers"))).recent()["attention_share"] is None
