"""The methods that choose the codes of a weight, one file each, and their table."""

from __future__ import annotations

from minifloat.errors import lookup
from minifloat.quantize.rounding.methods.gptq import Gptq
from minifloat.quantize.rounding.methods.match import Match
from minifloat.quantize.rounding.methods.nearest import Nearest
from minifloat.quantize.rounding.methods.protocol import Inputs, Method, Rounded
from minifloat.quantize.rounding.methods.tune import Tune

__all__ = ["METHODS", "Gptq", "Inputs", "Match", "Method", "Nearest", "Rounded", "Tune", "get_method"]

METHODS: dict[str, Method] = {method.name: method for method in (Nearest(), Gptq(), Match(), Tune())}


def get_method(name: str) -> Method:
    """Return the method `name`.

    Raises:
        UnknownNameError: If there is no such method; the message lists the valid names.
    """
    return lookup("method", name, METHODS)
