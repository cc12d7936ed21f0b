"""From samples to figures, by the names that ``vllm bench serve`` gives them, and beside them what the hardware allows.

The bound of a decode step is the time that reading its bytes takes at the machine's measured bandwidth: all weights
that a step multiplies with, once, and the keys and values of every sequence. Nothing that computes in BF16 or float32
can be faster for a few sequences; for many, arithmetic is the limit instead. Of mixtures of experts all experts are
counted, of which a small batch reads a part: their share of the bandwidth comes out too high.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minifloat.bench.workload import Sample, Workload
from minifloat.plan.roofline import step_bytes

_PERCENTILES = 100


@dataclass(frozen=True)
class Bytes:
    """What a step of an engine reads.

    Attributes:
        weights: Bytes of all weights that a step multiplies with.
        per_token: Bytes of keys and values of one token.
    """

    weights: int
    per_token: int

    def of_step(self, workload: Workload, batch: int) -> float:
        """Bytes of a decode step, on average over the output."""
        return step_bytes(self.weights, batch, (workload.input_len + workload.output_len / 2) * self.per_token)


@dataclass(frozen=True)
class BatchFigures:
    """An engine with one batch size. A list has an entry per round.

    Attributes:
        batch: So many prompts at a time.
        decode_ms: Milliseconds of the median step in which every sequence gets a token and nothing else happens; empty
            where there is no such step (the first sequences end before the last begins).
        bound_ms: What reading the bytes of such a step takes at the bandwidth of the round; empty without it.
        prefill: Tokens of prompts per second, as long as nothing else is at work.
        metrics: All rounds together, by the names of ``vllm bench serve``.
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
        """The same, if steps only took their reading."""
        return self.batch * 1e3 / statistics.median(self.bound_ms) if self.bound_ms else None

    @property
    def bandwidth_share(self) -> float | None:
        """The share of the read bandwidth that decode steps reach, 0 .. 1."""
        if not self.decode_ms or not self.bound_ms:
            return None
        return statistics.median(bound / took for bound, took in zip(self.bound_ms, self.decode_ms, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    samples: Sequence[Sample], batch: int, workload: Workload, read: Bytes, bandwidths: Sequence[float]
) -> BatchFigures:
    """The figures of one batch size.

    Args:
        samples: One per round.
        batch: The size.
        workload: What ran.
        read: What a step reads.
        bandwidths: Bytes per second in each round; empty where it cannot be measured.
    """
    decode = [decode_seconds(sample, batch) for sample in samples]
    known = [1e3 * seconds for seconds in decode if seconds is not None]
    nbytes = read.of_step(workload, batch)
    return BatchFigures(
        batch,
        tuple(known) if len(known) == len(samples) else (),
        tuple(1e3 * nbytes / bandwidth for bandwidth in bandwidths),
        tuple(prefill_rate(sample) for sample in samples),
        metrics(samples),
    )


def decode_seconds(sample: Sample, batch: int) -> float | None:
    """The median step in which each of `batch` sequences gets a token and no prompt is computed."""
    seconds = [step.seconds for step in sample.steps if step.generation_tokens == batch and not step.prompt_tokens]
    return statistics.median(seconds) if seconds else None


def prefill_rate(sample: Sample) -> float:
    """Tokens of prompts per second, in the steps up to the first that gives a token."""
    tokens, seconds = 0, 0.0
    for step in sample.steps:
        tokens, seconds = tokens + step.prompt_tokens, seconds + step.seconds
        if step.generation_tokens:
            break
    return tokens / seconds


def metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Throughput and latencies over all rounds, by the names of ``vllm bench serve``."""
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
    """Between the two values around it, in proportion, as numpy does."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=_PERCENTILES, method="inclusive")[percent - 1]


def spread(values: Sequence[float]) -> float | None:
    """The largest less the smallest, over the median."""
    return (max(values) - min(values)) / statistics.median(values) if values else None
