"""What is measured: so many prompts at a time, and when each of their tokens came.

The figures are those that the engine tells its observer, which are also those of a server's metrics; nothing is timed a
second time beside it. Prompts are random tokens, different ones in every run, so that no prefix of theirs is cached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from minifloat.errors import UsageError

if TYPE_CHECKING:
    from minifloat.serve.engine import Engine, StepStats, Timings, Usage


@dataclass(frozen=True)
class Workload:
    """Prompts and outputs.

    Attributes:
        input_len: Tokens of each prompt.
        output_len: Tokens that follow each.
        batch_sizes: So many prompts are sent at the same moment, one size after the other.
        rounds: How often everything is measured.
        seed: Of the prompts.
    """

    input_len: int = 256
    output_len: int = 128
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "rounds"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.output_len < 2:
            raise UsageError(
                f"output_len: expected at least 2, for there to be time between them; got {self.output_len}"
            )
        sizes = self.batch_sizes
        if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
            raise UsageError(f"batch_sizes: expected different numbers of at least 1, got {sizes}")

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len

    def prompts(self, number: int, batch: int, vocab: int) -> list[list[int]]:
        """The prompts of a round.

        Args:
            number: The round; rounds have different prompts.
            batch: How many.
            vocab: Their tokens are below.
        """
        generator = random.Random(f"{self.seed} {number} {batch}")
        return [[generator.randrange(vocab) for _ in range(self.input_len)] for _ in range(batch)]


@dataclass(frozen=True)
class Step:
    """A step of the engine: see `minifloat.serve.engine.StepStats`."""

    prompt_tokens: int
    generation_tokens: int
    seconds: float


@dataclass(frozen=True)
class Sample:
    """One batch, from its arrival to its last token. All times in seconds.

    Attributes:
        seconds: The whole.
        steps: In order.
        ttfts: From arrival to first token, of each request.
        itls: Between each token and the next of the same request.
        tpots: From first token to last, over the tokens after the first, of each request.
        e2els: From arrival to last token, of each request.
        input_tokens: Of all prompts.
        output_tokens: Of all outputs.
    """

    seconds: float
    steps: tuple[Step, ...]
    ttfts: tuple[float, ...]
    itls: tuple[float, ...]
    tpots: tuple[float, ...]
    e2els: tuple[float, ...]
    input_tokens: int
    output_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Of what `to_dict` made."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields | {"steps": tuple(Step(**step) for step in fields["steps"])})


@dataclass
class Recorder:
    """An observer that remembers: see `minifloat.serve.engine.Observer`."""

    steps: list[Step] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    e2els: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0

    def step(self, stats: StepStats) -> None:
        """A step is done."""
        self.steps.append(Step(stats.prompt_tokens, stats.generation_tokens, stats.seconds))

    def token(self, since_previous: float) -> None:
        """A token came."""
        self.itls.append(since_previous)

    def first_token(self, seconds: float) -> None:
        """The first token of a request came."""
        self.ttfts.append(seconds)

    def finished(self, reason: str, timings: Timings, usage: Usage) -> None:
        """A request is done."""
        if reason != "length" or timings.finished is None or timings.first_token is None:
            self.failed += 1
            return
        self.input_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.e2els.append(timings.finished - timings.arrived)
        self.tpots.append((timings.finished - timings.first_token) / max(usage.completion_tokens - 1, 1))


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> Sample:
    """Run prompts together on an engine that does nothing else.

    Args:
        engine: Its observer is set aside meanwhile.
        prompts: Token ids.
        output_len: Tokens that follow each, whatever the model says.

    Raises:
        UsageError: A prompt cannot run.
        RuntimeError: A step failed.
    """
    from minifloat.serve.engine import SamplingParams

    recorder = Recorder()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    before, engine.observer = engine.observer, recorder
    try:
        completions = engine.generate(prompts, params)
    finally:
        engine.observer = before
    if recorder.failed:
        raise RuntimeError(f"{recorder.failed} of {len(prompts)} requests did not run to their end")
    finished = [one.timings.finished for one in completions if one.timings.finished is not None]
    return Sample(
        max(finished) - min(one.timings.arrived for one in completions),
        tuple(recorder.steps),
        tuple(recorder.ttfts),
        tuple(recorder.itls),
        tuple(recorder.tpots),
        tuple(recorder.e2els),
        recorder.input_tokens,
        recorder.output_tokens,
    )
