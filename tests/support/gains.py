"""Hand-made results of `bench` with plausible numbers, for tests that run no engine."""

from __future__ import annotations

from typing import Any

from minifloat.evaluate.bench.figures import BatchFigures, EngineFigures, GainsReport
from minifloat.evaluate.bench.workload import Workload

GIB = 1 << 30
_METRICS = ("ttft", "tpot", "itl", "e2el")


def make_engine(name: str, scheme: str, nbytes: int, step_ms: float, **info: Any) -> EngineFigures:
    """Return the figures of an engine at batches of 1, 4 and 16 in two rounds."""
    facts = {
        "name": name,
        "scheme": scheme,
        "dtype": "bfloat16",
        "lm_head": "bf16",
        "activations": "bf16",
        "weight_bytes": nbytes,
        "step_bytes": nbytes,
        "kv_bytes_per_token": 4096,
        "kv_element": "bfloat16",
        "reason_not_native": None,
        "vocab_size": 512,
        "load_seconds": 1.0,
    }
    batches = {}
    for batch in (1, 4, 16):
        steps = (step_ms * (1 + batch / 16), step_ms * (1.02 + batch / 16))
        metrics = {f"{kind}_{metric}_ms": 10.0 * step_ms for metric in _METRICS for kind in ("median", "p99", "mean")}
        metrics |= {"output_throughput": 1e3 * batch / step_ms}
        bound = nbytes / 30e9 * 1e3
        batches[batch] = BatchFigures(batch, steps, (bound, bound), (1e6 / step_ms, 1e6 / step_ms), metrics)
    return EngineFigures(facts | info, 0.5, (nbytes / GIB, nbytes / GIB), 2 * nbytes, 2 * nbytes, batches, None)


def make_gains(speed_up: float = 2.5, **changes: Any) -> GainsReport:
    """Return a bench in which the quantized model is smaller by 2 and decodes `speed_up` times as fast."""
    values: dict[str, Any] = {
        "date": "2026-11-23T12:00:00+00:00",
        "machine": {"gpu": None, "minifloat": "0.1.0", "cores": 2, "threads": 2, "instruction_set": "avx512_bf16"},
        "workload": Workload(256, 128, (1, 4, 16), 2),
        "bandwidths": (30e9, 31e9),
        "together": True,
        "baseline": make_engine("storybook", "none", 2 * GIB, 70.0),
        "candidate": make_engine("storybook-fp8", "fp8", GIB, 70.0 / speed_up),
    }
    return GainsReport(**values | changes)
