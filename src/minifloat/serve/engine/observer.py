"""What the engine tells whoever counts: metrics, the status page, benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from minifloat.serve.engine.sequence import Timings, Usage


@dataclass(frozen=True)
class StepStats:
    """One step.

    Attributes:
        running: Sequences that have blocks in the KV cache, after the step.
        waiting: Sequences that have none yet, or none any more.
        kv_usage: Share of the cache's blocks in use, 0 .. 1.
        prompt_tokens: Tokens of prompts that were computed (again, after a preemption).
        generation_tokens: Tokens that were chosen.
        seconds: How long the step took.
        preemptions: Sequences that lost their blocks.
        weight_bytes_read: Bytes of the weights that one token is multiplied with: what a step reads at least.
        prefix_queries: Tokens of prompts that were looked up in the cache.
        prefix_hits: Those that were found.
    """

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


class Observer(Protocol):
    """Called from the engine's thread, so briefly."""

    def step(self, stats: StepStats) -> None:
        """A step is done."""

    def token(self, since_previous: float) -> None:
        """A token came, so many seconds after the one before it (ITL)."""

    def first_token(self, seconds: float) -> None:
        """The first token of a request came, so many seconds after its arrival (TTFT)."""

    def finished(self, reason: str, timings: Timings, usage: Usage) -> None:
        """A request is done, for one of the reasons of `Delivery.finish_reason`."""
