"""The gains of quantization, measured: memory and latency of two checkpoints on the same engine."""
