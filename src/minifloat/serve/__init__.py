"""Serving: checkpoints become models whose weights stay quantized, and models become text."""
