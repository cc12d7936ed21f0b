"""Number formats, schemes, and the plain-torch reference of quantization."""
