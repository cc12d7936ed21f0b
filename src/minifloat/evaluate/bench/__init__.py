"""The gains of quantization, measured: memory and latency of two checkpoints on the same engine."""

from minifloat.evaluate.bench.gains import BenchOptions, GainsReport, bench_checkpoint

__all__ = ["BenchOptions", "GainsReport", "bench_checkpoint"]
