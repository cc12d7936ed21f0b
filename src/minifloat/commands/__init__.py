"""The command line: one module per command; `display` holds what they print."""
