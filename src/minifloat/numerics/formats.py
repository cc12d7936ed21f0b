"""The number formats, each declared once by field widths, bias and all-ones exponent; all else is derived. No torch.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0 (E4M3, E5M2); OCP Microscaling Formats (MX) 1.0 (E2M1, E8M0).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from minifloat.errors import lookup


class Special(enum.Enum):
    """Meaning of the codes with an all-ones exponent."""

    NONE = "none"  #: finite numbers like all other codes (E2M1)
    NAN = "nan"  #: only the all-ones code is special, and it is NaN (E4M3 "fn", E8M0)
    IEEE = "ieee"  #: Inf with a zero mantissa, NaN otherwise (E5M2, float32)


@dataclass(frozen=True)
class ElementFormat:
    """A floating-point format of at most 32 bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    special: Special  #: meaning of the all-ones exponent
    signed: bool = True  #: the unsigned format (E8M0) has neither zero nor subnormals

    def __reduce__(self) -> tuple[Callable[[str], ElementFormat], tuple[str]]:
        """Make copies and pickles return the declared record, because the package compares formats by identity."""
        return get_format, (self.name,)

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    def decode(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} codes are 0..{(1 << self.bits) - 1}, got {code}")
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        top = (1 << self.exponent_bits) - 1
        exponent = (code >> self.mantissa_bits) & top
        sign = -1.0 if self.signed and code >> (self.bits - 1) else 1.0
        if exponent == top:
            if self.special is Special.IEEE:
                return sign * math.inf if mantissa == 0 else math.nan
            if self.special is Special.NAN and mantissa == (1 << self.mantissa_bits) - 1:
                return math.nan
        if exponent == 0 and self.signed:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        return sign * math.ldexp((1 << self.mantissa_bits) + mantissa, exponent - self.bias - self.mantissa_bits)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The values of all codes in order; only for formats of at most 8 bits."""
        if self.bits > 8:
            raise ValueError(f"{self.name} has too many codes to list")
        return tuple(self.decode(code) for code in range(1 << self.bits))

    @cached_property
    def max_code(self) -> int:
        all_ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.special is Special.NONE:
            return all_ones
        if self.special is Special.NAN:
            return all_ones - 1
        return all_ones - (1 << self.mantissa_bits)

    @cached_property
    def max(self) -> float:
        return self.decode(self.max_code)

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value, ``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return 1 - self.bias if self.signed else -self.bias

    @property
    def min_positive(self) -> float:
        """The smallest positive value, including subnormals."""
        return self.decode(1 if self.signed else 0)

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.emin)

    @property
    def nan_code(self) -> int | None:
        if self.special is Special.NONE:
            return None
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1


@dataclass(frozen=True)
class IntegerFormat(ElementFormat):
    """Integers in offset binary (packs of INT4 and INT8, read only): the value of a code is the code less `bias`."""

    def decode(self, code: int) -> float:
        """Return the value of one code."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} codes are 0..{(1 << self.bits) - 1}, got {code}")
        return float(code - self.bias)


E4M3 = ElementFormat("E4M3", 4, 3, 7, Special.NAN)
E5M2 = ElementFormat("E5M2", 5, 2, 15, Special.IEEE)
E2M1 = ElementFormat("E2M1", 2, 1, 1, Special.NONE)
E8M0 = ElementFormat("E8M0", 8, 0, 127, Special.NAN, signed=False)
FLOAT32 = ElementFormat("FP32", 8, 23, 127, Special.IEEE)
BFLOAT16 = ElementFormat("BF16", 8, 7, 127, Special.IEEE)
FLOAT16 = ElementFormat("FP16", 5, 10, 15, Special.IEEE)
INT4 = IntegerFormat("INT4", 0, 4, 8, Special.NONE, signed=False)
INT8 = IntegerFormat("INT8", 0, 8, 128, Special.NONE, signed=False)

FORMATS: dict[str, ElementFormat] = {
    f.name: f for f in (E4M3, E5M2, E2M1, E8M0, FLOAT32, BFLOAT16, FLOAT16, INT4, INT8)
}


def get_format(name: str) -> ElementFormat:
    return lookup("format", name, FORMATS)
