"""`doctor`: what this installation has, and what that means for speed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from minifloat._version import __version__
from minifloat.kernels import native

_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "compressed-tensors")


@dataclass(frozen=True)
class Diagnosis:
    """The state of an installation.

    Attributes:
        versions: minifloat, Python and the packages that matter; "not installed" where missing.
        cores: Cores that this process may use.
        instruction_set: What the native kernels run on, None without them.
        advice: Sentences on what is missing and what it costs; empty when nothing is.
    """

    versions: dict[str, str]
    cores: int
    instruction_set: str | None
    advice: tuple[str, ...]


def diagnose() -> Diagnosis:
    """Look at the installation; imports nothing heavy."""
    versions = {"minifloat": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in _PACKAGES}
    loaded = native.load() is not None
    advice = () if loaded else (
        f"native kernels are not available: {native.why_unavailable()}. Quantizing falls back to plain torch, with "
        "the same bits and many times slower.",
    )  # fmt: skip
    return Diagnosis(versions, len(os.sched_getaffinity(0)), native.isa() if loaded else None, advice)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
