"""Number formats and the plain-torch arithmetic that defines what quantizing means; imports no torch by itself."""
