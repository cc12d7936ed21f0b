"""Metrics of the engine and the server, for Prometheus and for the status page.

The names are vLLM's with the prefix `minifloat_` instead of `vllm:`, so that dashboards can be ported by replacing the
prefix. The engine's thread writes and the event loop reads, under one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from minifloat.engine import ModelInfo, StepStats, Timings, TokenUsage

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine

PREFIX = "minifloat"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
#: Seconds of history on the status page.
_WINDOW = 60
#: Seconds over which a rate is taken.
_RATE_SECONDS = 5
#: Number of latencies kept for the status page.
_KEPT_LATENCIES = 4096
#: Number of refused and failed requests on the status page, and the status from which an answer is one.
_KEPT_ERRORS, _FIRST_ERROR = 5, 400


class Metrics:
    """The metrics of a server; an `EngineListener` of the engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._lock = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=_WINDOW + 1)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)
        self._inter_token: deque[tuple[float, float]] = deque(maxlen=_KEPT_LATENCIES)
        self._errors: deque[tuple[float, str, int]] = deque(maxlen=_KEPT_ERRORS)
        self._make_gauges(engine.engine.info)
        self._make_counters()
        if engine.engine.speculator is not None:
            self._make_speculation(engine.engine.speculator.longest)
        self._make_histograms()

    def _make_gauges(self, info: ModelInfo) -> None:
        running = self._gauge("num_requests_running", "Running requests.")
        running.set_function(lambda: self._engine.running)
        waiting = self._gauge("num_requests_waiting", "Waiting requests.")
        waiting.set_function(lambda: self._engine.waiting)
        kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")
        kv_usage.set_function(lambda: self._engine.kv_usage)
        self._bandwidth = self._gauge(
            "decode_bandwidth_bytes_per_second", "Bytes of weights read per second of the last step."
        )
        self._gauge("kv_bytes", "Memory of the KV cache.").set(info.kv_bytes)
        weights = self._gauge("weight_bytes", "Bytes of the weights.", ("format",))
        weights.labels(format=info.scheme).set(info.weight_bytes)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Computed prompt tokens.")
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Requests that lost their place in the KV cache.")
        self._finished = self._counter("request_success", "Finished requests.", ("finished_reason",))
        for reason in ("stop", "length", "cancelled", "error"):
            self._finished.labels(finished_reason=reason)
        self._rejections = self._counter("admission_rejections", "Refused requests.", ("reason",))
        for reason in ("queue_full", "stopping"):
            self._rejections.labels(reason=reason)
        self._http = self._counter("http_requests", "Answers by route and status.", ("route", "status"))

    def _make_speculation(self, positions: int) -> None:
        self._drafts = self._counter("spec_decode_num_drafts", "Drafts of a sequence in a step.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Proposed tokens.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.")
        accepted = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", ("position",)
        )
        self._accepted_per_position = [accepted.labels(position=str(position)) for position in range(positions)]

    def _make_histograms(self) -> None:
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", _SHORT)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, of a request.", _SHORT
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._queue_time = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _LONG)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=self.registry)

    # ------------------------------------------------------------------------------- from the engine's thread

    def step(self, stats: StepStats) -> None:
        if stats.seconds > 0:
            self._bandwidth.set(stats.weight_bytes_read / stats.seconds)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generation_tokens.inc(stats.generation_tokens)
        self._prefix_queries.inc(stats.prefix_queries)
        self._prefix_hits.inc(stats.prefix_hits)
        self._preemptions.inc(stats.preemptions)
        if stats.speculation is not None:
            self._drafts.inc(stats.speculation.drafts)
            self._draft_tokens.inc(stats.speculation.draft_tokens)
            self._accepted_tokens.inc(stats.speculation.accepted_tokens)
            for counter, count in zip(
                self._accepted_per_position, stats.speculation.accepted_per_position, strict=True
            ):
                counter.inc(count)
        with self._lock:
            second = int(time.monotonic())
            if not self._seconds or self._seconds[-1].at != second:
                self._seconds.append(_Second(second))
            self._seconds[-1].add(stats, self._engine.waiting)

    def token(self, since_previous: float) -> None:
        self._itl.observe(since_previous)
        with self._lock:
            self._inter_token.append((time.monotonic(), since_previous))

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)
        with self._lock:
            self._first_tokens.append((time.monotonic(), seconds))

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        self._finished.labels(finished_reason=reason).inc()
        if timings.finished is None:
            return
        self._e2e.observe(timings.finished - timings.arrived)
        if timings.scheduled is not None:
            self._queue_time.observe(timings.scheduled - timings.arrived)
        if timings.scheduled is not None and timings.first_token is not None:
            decode = timings.finished - timings.first_token
            self._prefill.observe(timings.first_token - timings.scheduled)
            self._decode.observe(decode)
            if usage.completion_tokens > 1:
                self._tpot.observe(decode / (usage.completion_tokens - 1))

    # ------------------------------------------------------------------------------- from the server

    def rejected(self, reason: str) -> None:
        self._rejections.labels(reason=reason).inc()

    def answered(self, route: str, status: int) -> None:
        self._http.labels(route=route, status=str(status)).inc()
        if status >= _FIRST_ERROR:
            self._errors.append((time.monotonic(), route, status))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def recent(self) -> dict[str, Any]:
        """Return the last minute for the status page: rates in tokens per second, latencies in milliseconds."""
        now = time.monotonic()
        with self._lock:
            seconds = list(self._seconds)
            first_tokens = [(at, value) for at, value in self._first_tokens if at > now - _WINDOW]
            pauses = [(at, value) for at, value in self._inter_token if at > now - _WINDOW]
        by_second = {second.at: second for second in seconds}
        history = [by_second.get(int(now) - age) for age in range(_WINDOW, 0, -1)]
        rates = [0 if second is None else second.generated for second in history]
        return {
            "running": self._engine.running,
            "waiting": self._engine.waiting,
            "kv_usage": self._engine.kv_usage,
            "generation_tokens_per_second": sum(rates[-_RATE_SECONDS:]) / _RATE_SECONDS,
            "prompt_tokens_per_second": sum(second.prompt for second in history[-_RATE_SECONDS:] if second)
            / _RATE_SECONDS,
            "history": rates,
            "ttft_history": _medians_by_second(first_tokens, int(now)),
            "itl_history": _medians_by_second(pauses, int(now)),
            "waiting_history": [0 if second is None else second.waiting for second in history],
            "prefix_hit_share": _prefix_hit_share([second for second in history if second is not None]),
            "errors": [
                {"seconds_ago": round(now - at), "route": route, "status": status}
                for at, route, status in reversed(self._errors)
            ],
            "ttft_ms": _quantiles([value for _, value in first_tokens]),
            "itl_ms": _quantiles([value for _, value in pauses]),
            "speculation": self._speculation(),
            "attention_share": self._attention_share(),
        }

    def _attention_share(self) -> float | None:
        """Return attention's share of the time of all steps since the start; None if it is not measured."""
        seconds = self._engine.engine.part_seconds()
        total = sum(seconds.values())
        return seconds["attention"] / total if total else None

    def _speculation(self) -> dict[str, Any] | None:
        """Return the counts of speculation since the start; None if the engine does not speculate."""
        speculator = self._engine.engine.speculator
        return None if speculator is None else speculator.stats.to_dict()


class _Second:
    """Numbers of tokens in one second, and the longest queue."""

    def __init__(self, at: int) -> None:
        self.at, self.generated, self.prompt = at, 0, 0
        self.waiting, self.prefix_queries, self.prefix_hits = 0, 0, 0

    def add(self, stats: StepStats, waiting: int) -> None:
        self.generated += stats.generation_tokens
        self.prompt += stats.prompt_tokens
        self.prefix_queries += stats.prefix_queries
        self.prefix_hits += stats.prefix_hits
        self.waiting = max(self.waiting, waiting)


def _prefix_hit_share(seconds: list[_Second]) -> float | None:
    """Return the share of the prompt tokens that the prefix cache had; None without a look-up."""
    queries = sum(second.prefix_queries for second in seconds)
    return sum(second.prefix_hits for second in seconds) / queries if queries else None


def _medians_by_second(values: list[tuple[float, float]], now: int) -> list[float | None]:
    """Return the median of each of the last seconds, in milliseconds; None for a second without a value."""
    by_second: dict[int, list[float]] = {}
    for at, value in values:
        by_second.setdefault(int(at), []).append(value)
    return [1e3 * median(by_second[second]) if second in by_second else None for second in range(now - _WINDOW, now)]


def _quantiles(seconds: list[float]) -> dict[str, float] | None:
    """Return median and p99 in milliseconds; None without measurements."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {"median": 1e3 * median(ordered), "p99": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}
