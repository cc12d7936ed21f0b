"""Number formats, schemes, and the plain-torch reference of quantization.

The modules `formats`, `granularity`, `scheme`, `cast_stats`, `divisor` and `histogram` import no torch.
"""
