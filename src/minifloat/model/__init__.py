"""What a model is: families, names on disk, the quantization plan of its tensors, and weights in memory."""
