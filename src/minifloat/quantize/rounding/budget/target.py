"""`Budget`: what a quantized model may cost, or how far it may be from the original one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from minifloat.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """One bound; exactly one of the three is given.

    Attributes:
        bits: Bits per weight of the linears and experts of the decoder layers, scales included.
        nbytes: Bytes of all tensors of the output.
        max_kl: KL divergence from the original model on held-out text, in nats per token.

    Raises:
        UsageError: None or several bounds are given, or one is not a positive number.
    """

    bits: float | None = None
    nbytes: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self._bounds.items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise UsageError(f"a budget is one of {', '.join(self._bounds)}; got {found}")
        name, value = next(iter(given.items()))
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}: expected a positive number, got {value}")

    @property
    def _bounds(self) -> dict[str, float | int | None]:
        return {"--target-bits": self.bits, "--target-bytes": self.nbytes, "--max-kl": self.max_kl}

    def __str__(self) -> str:
        """Return the bound in words, for messages."""
        if self.bits is not None:
            return f"{self.bits:g} bits per weight"
        return f"{self.nbytes:,} bytes" if self.nbytes is not None else f"a KL divergence of {self.max_kl:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"bits": self.bits, "bytes": self.nbytes, "max_kl": self.max_kl}
