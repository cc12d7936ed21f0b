"""Comparison of a quantized model with its baseline on the same tokens, with a verdict."""
