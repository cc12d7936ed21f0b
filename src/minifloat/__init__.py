"""minifloat: post-training FP8 / MXFP4 quantization of language models, with proof.

Importing this package imports no torch: the names below are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minifloat._version import __version__

if TYPE_CHECKING:
    from minifloat.checkpoint import Checkpoint
    from minifloat.errors import MinifloatError
    from minifloat.scheme import SCHEMES, Scheme

#: Public name -> the module that defines it.
_EXPORTS = {
    "Checkpoint": "minifloat.checkpoint",
    "MinifloatError": "minifloat.errors",
    "SCHEMES": "minifloat.scheme",
    "Scheme": "minifloat.scheme",
}

__all__ = ["SCHEMES", "Checkpoint", "MinifloatError", "Scheme", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
