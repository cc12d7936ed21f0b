"""Figures of a bench, named as in ``vllm bench serve``, with the lower bound that memory bandwidth sets.

The bound of a decode step is the time to read its bytes at the machine's measured bandwidth: each weight that a step
multiplies with once, and the keys and values of every sequence. For a few sequences no step in BF16 or float32 can be
faster; for many sequences arithmetic is the limit instead. For mixtures of experts the bound counts all experts, of
which a small batch reads only some, so their share of the bandwidth comes out too high.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minifloat.deploy.estimate.roofline import step_bytes
from minifloat.evaluate.bench.workload import BatchTimings, Workload

_PERCENTILES = 100


@dataclass(frozen=True)
class StepBytes:
    """Number of bytes that a decode step of an engine reads."""

    weights: int
    per_token: int

    def of_step(self, workload: Workload, batch: int) -> float:
        """Return the bytes of a decode step, averaged over the length of the output."""
        return step_bytes(self.weights, batch, (workload.input_len + workload.output_len / 2) * self.per_token)


@dataclass(frozen=True)
class BatchFigures:
    """Figures of an engine at one batch size. Tuples have an entry per round.

    Attributes:
        bound_ms: Milliseconds to read the bytes of such a step at the bandwidth of the round; empty if unknown.
    """

    batch: int
    decode_ms: tuple[float, ...]
    bound_ms: tuple[float, ...]
    prefill: tuple[float, ...]
    metrics: dict[str, float]

    @property
    def decode_throughput(self) -> float | None:
        """Tokens per second while all sequences decode."""
        return self.batch * 1e3 / statistics.median(self.decode_ms) if self.decode_ms else None

    @property
    def bound_throughput(self) -> float | None:
        """Upper bound of `decode_throughput` that the memory bandwidth sets."""
        return self.batch * 1e3 / statistics.median(self.bound_ms) if self.bound_ms else None

    @property
    def bandwidth_share(self) -> float | None:
        """Share of the read bandwidth that decode steps reach, 0..1."""
        if not self.decode_ms or not self.bound_ms:
            return None
        return statistics.median(bound / step for bound, step in zip(self.bound_ms, self.decode_ms, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return self.metrics | {
            "max_concurrency": self.batch,
            "decode_step_ms": list(self.decode_ms),
            "decode_step_ms_spread": spread(self.decode_ms),
            "decode_throughput": self.decode_throughput,
            "decode_bound_ms": list(self.bound_ms),
            "decode_bound_throughput": self.bound_throughput,
            "decode_bandwidth_share": self.bandwidth_share,
            "prefill_throughput": statistics.median(self.prefill),
            "prefill_throughput_rounds": list(self.prefill),
        }


def batch_figures(
    samples: Sequence[BatchTimings], batch: int, workload: Workload, read: StepBytes, bandwidths: Sequence[float]
) -> BatchFigures:
    """Return the figures of one batch size."""
    decode = [decode_seconds(sample, batch) for sample in samples]
    decode_ms = [1e3 * seconds for seconds in decode if seconds is not None]
    nbytes = read.of_step(workload, batch)
    return BatchFigures(
        batch,
        tuple(decode_ms) if len(decode_ms) == len(samples) else (),
        tuple(1e3 * nbytes / bandwidth for bandwidth in bandwidths),
        tuple(prefill_rate(sample) for sample in samples),
        metrics(samples),
    )


def decode_seconds(sample: BatchTimings, batch: int) -> float | None:
    """Return the seconds in which `batch` sequences get one token each, while no prompt is computed.

    Without drafts that is the median step. With drafts, steps give different numbers of tokens, and it is the mean.
    """
    decoding = [step for step in sample.steps if not step.prompt_tokens]
    if any(step.draft_tokens for step in decoding):
        steps = [step for step in decoding if step.generation_tokens >= batch]
        tokens = sum(step.generation_tokens for step in steps)
        return sum(step.seconds for step in steps) * batch / tokens if tokens else None
    seconds = [step.seconds for step in decoding if step.generation_tokens == batch]
    return statistics.median(seconds) if seconds else None


def prefill_rate(sample: BatchTimings) -> float:
    """Return the prompt tokens per second in the steps up to the first that outputs a token."""
    tokens, seconds = 0, 0.0
    for step in sample.steps:
        tokens, seconds = tokens + step.prompt_tokens, seconds + step.seconds
        if step.generation_tokens:
            break
    return tokens / seconds


def metrics(samples: Sequence[BatchTimings]) -> dict[str, float]:
    """Return throughput and latencies over all rounds, named as in ``vllm bench serve``."""
    duration = sum(sample.seconds for sample in samples)
    inputs, outputs = (sum(getattr(s, name) for s in samples) for name in ("input_tokens", "output_tokens"))
    completed = sum(len(sample.e2els) for sample in samples)
    result: dict[str, float] = {
        "completed": completed,
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": completed / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = [1e3 * value for sample in samples for value in getattr(sample, f"{name}s")]
        result |= {
            f"mean_{name}_ms": statistics.fmean(values),
            f"median_{name}_ms": statistics.median(values),
            f"std_{name}_ms": statistics.pstdev(values),
            f"p99_{name}_ms": percentile(values, 99),
        }
    return result


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated linearly between the two nearest values as in numpy."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=_PERCENTILES, method="inclusive")[percent - 1]


def spread(values: Sequence[float]) -> float | None:
    """Return the difference of the largest and the smallest value over the median; None for fewer than two."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None
