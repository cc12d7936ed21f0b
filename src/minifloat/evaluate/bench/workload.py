"""The workload of a bench, and its engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.kernels.processors import TeamOptions
from minifloat.numerics.ranges import AtLeastTwo, Count, check_fields


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

    def prompts(self, number: int, batch: int, vocab: int) -> list[list[int]]:
        """Return prompts of random tokens, different in every round, so that no prefix of a prompt is cached."""
        generator = random.Random(f"{self.seed} {number} {batch}")
        return [[generator.randrange(vocab) for _ in range(self.input_len)] for _ in range(batch)]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(TeamOptions):
    """The engines of a bench.

    Attributes:
        engine: The candidate's engine, as far as the workload does not say; the baseline's has its device.
        revision: Branch, tag or commit of a baseline of the hub.
    """

    engine: EngineOptions = field(default_factory=EngineOptions)
    revision: str | None = None

    def engines(self, workload: Workload) -> tuple[EngineOptions, EngineOptions]:
        """Return the options of both engines: every prompt of the largest batch runs at once and at full length."""
        length, most = workload.input_len + workload.output_len, max(workload.batch_sizes)
        needed: dict[str, Any] = {"max_model_len": length, "max_num_seqs": most, "prefix_cache": False}
        return EngineOptions(device=self.engine.device, **needed), replace(self.engine, **needed)
