"""The gains of quantization, measured: memory and latency of two checkpoints on the same engine."""

from minifloat.evaluate.bench.gains import GainsReport, bench_checkpoint

__all__ = ["GainsReport", "bench_checkpoint"]
