"""Loading: a checkpoint becomes a model whose weights stay quantized."""
