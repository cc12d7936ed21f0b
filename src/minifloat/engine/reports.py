"""What the engine reports of its model, of steps, tokens and requests: to metrics, the status page, benchmarks."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from minifloat.engine.scheduler import Scheduler, WorkItem
from minifloat.engine.sequence import Sequence, Timings, TokenUsage
from minifloat.engine.speculation import SpeculationStats


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: str
    architecture: str
    runner: str
    device: str
    reason_not_native: str
    scheme: str
    dtype: str
    lm_head: str
    activations: str
    weight_bytes: int
    bf16_bytes: int
    step_bytes: int
    kv_element: str
    kv_bytes: int
    kv_bytes_per_token: int
    kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    load_seconds: float
    prefill_bytes: int = 0
    speculation: str = ""
    draft_bytes: int = 0
    state_bytes: int = 0
    state_copies: int = 0
    reason_no_prefix_cache: str = ""
    deterministic: bool = False
    isa: str = ""
    task: str = "generate"  # or "embed", "score": then no text is generated
    vector_size: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StepStats:
    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    seconds: float
    preemptions: int
    weight_bytes_read: int
    prefix_queries: int
    prefix_hits: int
    speculation: SpeculationStats | None = None


class EngineListener(Protocol):
    """Receives what an engine reports. Methods are called in the engine's thread and must return quickly."""

    def step(self, stats: StepStats) -> None:
        """Receive the numbers of a step that is done."""

    def token(self, since_previous: float) -> None:
        """Receive the seconds between a token and the one before it (inter-token latency)."""

    def first_token(self, seconds: float) -> None:
        """Receive the seconds from a request's arrival to its first token (time to first token)."""

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        """Receive the end of a request; `reason` is one of `Delivery.finish_reason`."""


class Reporter:
    """Notes the times of tokens, and reports to a listener if there is one."""

    def __init__(self, listener: EngineListener | None) -> None:
        self.listener = listener
        self._reported_totals = (0, 0, 0)

    def step(
        self,
        scheduler: Scheduler,
        items: Sequences[WorkItem],
        generated: int,
        seconds: float,
        nbytes: int,
        speculation: SpeculationStats | None = None,
    ) -> None:
        totals = (scheduler.preemptions, scheduler.prefix_queries, scheduler.prefix_hits)
        preemptions, queries, hits = (now - before for now, before in zip(totals, self._reported_totals, strict=True))
        self._reported_totals = totals
        if self.listener is None:
            return
        prompt_tokens = sum(
            [
                min(end, sequence.prompt_length) - start
                for sequence, start, end, _, _ in items
                if start < sequence.prompt_length
            ]
        )
        self.listener.step(
            StepStats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                kv_usage=scheduler.pool.usage,
                prompt_tokens=prompt_tokens,
                generation_tokens=generated,
                seconds=seconds,
                preemptions=preemptions,
                weight_bytes_read=nbytes if items else 0,
                prefix_queries=queries,
                prefix_hits=hits,
                speculation=speculation,
            )
        )

    def token(self, sequence: Sequence, now: float) -> None:
        """Note the time of a sequence's new token, in seconds of `time.monotonic`, and report it."""
        # Several tokens of one step have the same time: the first of them took all of it.
        timings = sequence.timings
        if timings.first_token is None:
            timings.first_token = now
            if self.listener is not None:
                self.listener.first_token(now - timings.arrived)
        elif self.listener is not None and sequence.last_token is not None:
            self.listener.token(now - sequence.last_token)
        sequence.last_token = now

    def finished(self, reason: str, sequence: Sequence) -> None:
        if self.listener is not None:
            self.listener.finished(reason, sequence.timings, sequence.usage)
