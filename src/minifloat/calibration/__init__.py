"""Calibration: what the activations of a model look like on representative text, and the static scales from it."""
