"""`doctor`: the parts of this installation that matter for speed."""

from __future__ import annotations

import contextlib
import importlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from minifloat._version import __version__
from minifloat.kernels import native, processors

_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "compressed-tensors")


@dataclass(frozen=True)
class Diagnosis:
    """The state of an installation.

    Attributes:
        versions: minifloat, Python and the packages that matter; "not installed" where missing.
        cores: Cores that this process may be scheduled on.
        cpu_quota: Cores' worth of CPU time that control groups allow; None without a limit.
        threads: Threads that the kernels use at most.
        openmp: Paths of the OpenMP runtimes that torch and the native kernels load.
        instruction_set: Instruction set of the native kernels; None without them.
        advice: Sentences on missing parts and their costs; empty if nothing is missing.
    """

    versions: dict[str, str]
    cores: int
    cpu_quota: float | None
    threads: int
    openmp: tuple[str, ...]
    instruction_set: str | None
    advice: tuple[str, ...]


def doctor() -> Diagnosis:
    """Examine the installation; this imports torch, to find the OpenMP runtime that comes with it."""
    versions = {"minifloat": __version__, "python": platform.python_version()}
    versions |= {package: _version(package) for package in _PACKAGES}
    with contextlib.suppress(ImportError, OSError):  # the commands that need torch report that it does not load
        importlib.import_module("torch")
    loaded = native.load() is not None
    openmp = processors.openmp_runtimes()
    return Diagnosis(
        versions,
        processors.available(),
        processors.cgroup_quota(),
        processors.limit(),
        openmp,
        native.isa() if loaded else None,
        tuple(_advice(loaded, openmp)),
    )


def _advice(loaded: bool, openmp: tuple[str, ...]) -> Iterator[str]:
    if not loaded:
        yield (
            f"native kernels are not available: {native.why_unavailable()}. Quantizing falls back to plain torch, with "
            "the same bits and many times slower."
        )
    if len(openmp) > 1:
        yield (
            f"{len(openmp)} OpenMP runtimes are loaded ({', '.join(openmp)}): torch and the kernels then have threads "
            "of their own, which take the cores from each other. Build the kernels with the compiler whose runtime "
            "torch brings (libgomp: g++; libomp: clang++)."
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
