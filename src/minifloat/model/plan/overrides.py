"""`Override`: a pattern of module names, and the scheme that replaces the plan's scheme for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from minifloat.errors import PatternError, lookup
from minifloat.numerics.scheme import SCHEMES, Scheme

#: The word for "keep the model's precision" in place of a scheme's name.
KEEP = "bf16"


@dataclass(frozen=True)
class Override:
    """A pattern, and the scheme of the modules that it matches.

    Attributes:
        scheme: The scheme, or None to keep the module in the model's precision.
    """

    pattern: str
    scheme: Scheme | None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read ``REGEX=SCHEME`` or ``REGEX=bf16``, as the command line writes it."""
        pattern, separator, name = text.rpartition("=")
        if not separator or not pattern:
            raise PatternError(f"an override is REGEX=SCHEME or REGEX={KEEP}, got {text!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
        return cls(pattern, lookup("scheme", name, {KEEP: None, **SCHEMES}))

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.pattern}={KEEP if self.scheme is None else self.scheme.name}"
