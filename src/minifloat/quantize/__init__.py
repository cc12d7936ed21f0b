"""BF16 weights to quantized weights: the numerics, the plan and the streaming writer."""
