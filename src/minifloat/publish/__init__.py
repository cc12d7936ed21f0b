"""Publishing: a quantized model folder becomes a model of the hub."""
