"""The workload of a bench: batches of prompts, and the times at which the engine returned their tokens.

The times are those that the engine reports to its observer, which a server's metrics use too; the bench times nothing
itself. Prompts are random tokens, different in every round, so that no prefix of a prompt is cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.numerics.ranges import AtLeastTwo, Count, check_fields

if TYPE_CHECKING:
    from minifloat.engine import Engine, StepStats, Timings, TokenUsage


@dataclass(frozen=True)
class Workload:
    """Lengths of prompts and outputs, and the batch sizes to run.

    Attributes:
        input_len: Tokens per prompt.
        output_len: Tokens per output; at least 2, to measure the time between tokens.
        batch_sizes: Prompts at a time, one size after the other.
        rounds: Times that both models are measured in turn.
        seed: Seed of the prompts.
    """

    input_len: Count = 256
    output_len: AtLeastTwo = 128
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    rounds: Count = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = self.batch_sizes
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise UsageError(f"batch_sizes: expected different numbers of at least 1, got {sizes}")

    @property
    def length(self) -> int:
        """Tokens of a prompt with its output."""
        return self.input_len + self.output_len

    def prompts(self, number: int, batch: int, vocab: int) -> list[list[int]]:
        """Return the prompts of a round.

        Args:
            number: Number of the round; rounds have different prompts.
            batch: Number of prompts.
            vocab: Upper bound of the token ids, exclusive.
        """
        generator = random.Random(f"{self.seed} {number} {batch}")
        return [[generator.randrange(vocab) for _ in range(self.input_len)] for _ in range(batch)]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The engines of a bench.

    Attributes:
        engine: The candidate's engine, as far as the workload does not say; the baseline's has its device.
        threads: Threads of each engine; None: all.
        revision: Branch, tag or commit of a baseline of the hub.
    """

    engine: EngineOptions = field(default_factory=EngineOptions)
    threads: Count | None = None
    revision: str | None = None

    def engines(self, workload: Workload) -> tuple[EngineOptions, EngineOptions]:
        """Return the options of the engines of baseline and candidate."""
        # Every prompt of the largest batch runs at once and at full length.
        needed: dict[str, Any] = {
            "max_model_len": workload.length,
            "max_num_seqs": max(workload.batch_sizes),
            "prefix_cache": False,
        }
        return EngineOptions(device=self.engine.device, **needed), replace(self.engine, **needed)


@dataclass(frozen=True)
class EngineStep:
    """Tokens and seconds of one step of the engine, from `minifloat.engine.StepStats`."""

    prompt_tokens: int
    generation_tokens: int
    seconds: float
    draft_tokens: int = 0


@dataclass(frozen=True)
class BatchTimings:
    """Times of one batch, from its arrival to its last token, in seconds.

    Attributes:
        seconds: Time of the whole batch.
    """

    seconds: float
    steps: tuple[EngineStep, ...]
    ttfts: tuple[float, ...]
    itls: tuple[float, ...]
    tpots: tuple[float, ...]
    e2els: tuple[float, ...]
    input_tokens: int
    output_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the times as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BatchTimings:
        """Return the times that `to_dict` returned as JSON values."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields | {"steps": tuple(EngineStep(**step) for step in fields["steps"])})


@dataclass
class TimingRecorder:
    """An observer of the engine that keeps all reported times."""

    steps: list[EngineStep] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    e2els: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0

    def step(self, stats: StepStats) -> None:
        """Record a finished step."""
        drafts = 0 if stats.speculation is None else stats.speculation.draft_tokens
        self.steps.append(EngineStep(stats.prompt_tokens, stats.generation_tokens, stats.seconds, drafts))

    def token(self, since_previous: float) -> None:
        """Record the time since the previous token of a request."""
        self.itls.append(since_previous)

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request."""
        self.ttfts.append(seconds)

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        """Record a finished request."""
        if reason != "length" or timings.finished is None or timings.first_token is None:
            self.failed += 1
            return
        self.input_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.e2els.append(timings.finished - timings.arrived)
        self.tpots.append((timings.finished - timings.first_token) / max(usage.completion_tokens - 1, 1))


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> BatchTimings:
    """Run prompts together on an otherwise idle engine, and return their times."""
    from minifloat.engine import SamplingParams

    recorder = TimingRecorder()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    before, engine.observer = engine.observer, recorder
    try:
        completions = engine.generate(prompts, params)
    finally:
        engine.observer = before
    if recorder.failed:
        raise RuntimeError(f"{recorder.failed} of {len(prompts)} requests did not run to their end")
    finished = [entry.timings.finished for entry in completions if entry.timings.finished is not None]
    return BatchTimings(
        max(finished) - min(entry.timings.arrived for entry in completions),
        tuple(recorder.steps),
        tuple(recorder.ttfts),
        tuple(recorder.itls),
        tuple(recorder.tpots),
        tuple(recorder.e2els),
        recorder.input_tokens,
        recorder.output_tokens,
    )
