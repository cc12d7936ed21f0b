"""The quantization plan: what becomes of every tensor of a checkpoint."""
