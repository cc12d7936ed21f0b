"""vLLM as the engine of `minifloat serve`: its options, and the start."""
