"""Publishing: upload of a quantized model folder to the hub."""
