"""Methods that choose the codes of quantized weights with calibration data."""
