"""Calibration of a model that does not fit in memory: layer by layer, each layer over all sequences."""
