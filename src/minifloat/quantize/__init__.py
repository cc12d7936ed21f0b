"""`quantize`: static scales, the streaming cast of weights, the run, the report and the model card."""
