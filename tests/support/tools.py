"""Other people's tools, each in a virtual environment of its own that is made when a test first asks for it.

They pin versions of torch and transformers that disagree with each other and with ours, so nothing of them is imported:
a script of `tests/interop` runs under the tool's Python and answers in JSON.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTEROP = ROOT / "tests" / "interop"
#: Where the environments lie; they are kept, and made again when their requirements change.
VENVS = Path(os.environ.get("MINIFLOAT_INTEROP_VENVS", ROOT / ".venv-interop"))

#: Tool -> packages that its installation brings and that were built for another torch than the one it runs on.
TOOLS: dict[str, tuple[str, ...]] = {
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
    "llmcompressor": (),
    "lm-eval": (),
    "llama-cpp": (),
    "agents": (),
    "mlx": (),
    "ray": ("torchvision", "torchaudio", "torchcodec"),
}
_COMPLETE = "minifloat-interop.sha256"
#: torchvision of the torch in requirements-vllm.txt. Its operators are built for CUDA, so that it is kept apart.
_TORCHVISION = "torchvision==0.28.0"

#: vLLM's package for GPUs, and Humming, which it requires, with what is imported of it.
_VLLM_FOR_GPUS = ("vllm==0.33.0", "humming-kernels==0.1.19", "cuda-bindings", "cuda-pathfinder")


@cache
def python_of(tool: str) -> str:
    """The Python of a tool's environment, which is made if it is not there."""
    requirements = INTEROP / f"requirements-{tool}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = VENVS / tool
    python, complete = folder / "bin" / "python", folder / _COMPLETE
    VENVS.mkdir(parents=True, exist_ok=True)
    with _locked(VENVS / f"{tool}.lock"):
        if not complete.exists() or complete.read_text() != digest:
            venv.create(folder, clear=True, with_pip=True)
            first = requirements.read_text().splitlines()[0]
            _pip(tool, python, "install", first)
            _pip(tool, python, "install", "--requirement", str(requirements))
            if TOOLS[tool]:
                _pip(tool, python, "uninstall", "--yes", *TOOLS[tool])
            complete.write_text(digest)
    return str(python)


@cache
def torchvision_of(tool: str) -> str:
    """What PYTHONPATH must be for a tool to import torchvision without its operators, which no model of text calls.

    torchvision cannot be imported without its compiled operators; ``torchvision_operators/sitecustomize.py`` declares
    them.
    """
    python, folder = Path(python_of(tool)), VENVS / f"{tool}-torchvision"
    with _locked(VENVS / f"{tool}.lock"):
        if not (folder / "torchvision").is_dir():
            _pip(tool, python, "install", "--no-deps", "--target", str(folder), _TORCHVISION)
    return os.pathsep.join([str(INTEROP / "torchvision_operators"), str(folder)])


@cache
def vllm_for_gpus() -> str:
    """What PYTHONPATH must be for the Python code of vLLM's package for GPUs to be imported where vLLM is for CPUs."""
    python, folder = Path(python_of("vllm")), VENVS / "vllm-for-gpus"
    with _locked(VENVS / "vllm.lock"):
        if not (folder / "vllm").is_dir():
            _pip("vllm", python, "install", "--no-compile", "--no-deps", "--target", str(folder), *_VLLM_FOR_GPUS)
    return str(folder)


def _pip(tool: str, python: Path, *arguments: str) -> None:
    run = subprocess.run([python, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)
    if run.returncode:
        pytest.fail(
            f"the environment of {tool} could not be made: pip {' '.join(arguments)}\n{run.stderr[-2000:]}",
            pytrace=False,
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for others who make the same environment."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(**changes: str) -> dict[str, str]:
    """What a tool sees: no hub, no network, none of our paths."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"} | changes


def run_script(tool: str, script: str, request: Any, folder: Path, timeout: float = 900, **variables: str) -> list[Any]:
    """Run a script of `tests/interop` under a tool's Python."""
    asked, answered, log = (folder / f"{script}.{end}" for end in ("request", "answers", "log"))
    asked.write_text(json.dumps(request))
    answered.write_text("")
    command = [python_of(tool), str(INTEROP / script), str(asked), str(answered)]
    with log.open("a") as output:
        subprocess.run(command, env=environment(**variables), cwd=folder, stdout=output, stderr=output, timeout=timeout)
    return [json.loads(line) for line in answered.read_text().splitlines()]


def has_amx() -> bool:
    """Whether this machine has what vLLM's kernels for quantized weights on a CPU need."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


if __name__ == "__main__":
    for name in sys.argv[1:] or TOOLS:
        print(python_of(name))
