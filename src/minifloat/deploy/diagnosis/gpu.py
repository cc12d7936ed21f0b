"""GPUs and their driver, as nvidia-smi names them, and whether torch can use them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.deploy.check import ENGINE_HARDWARE

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
_SECONDS = 20.0
_FIELDS = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        hardware: Its name for `check` and `plan`; None: the tables do not have it.
    """

    name: str
    memory: int
    driver: str
    capability: str
    hardware: str | None


def find_gpus(query: Sequence[str] = _QUERY) -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs of this machine; none where there is no driver that answers."""
    try:
        answer = subprocess.run(
            query, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(filter(None, map(_parse, answer.stdout.splitlines()))) if answer.returncode == 0 else ()


def _parse(line: str) -> Gpu | None:
    """Return the GPU of a line ``NVIDIA H100 80GB HBM3, 81559, 570.86.10, 9.0``; None for another line."""
    fields = [field.strip() for field in line.rsplit(",", _FIELDS - 1)]
    if len(fields) != _FIELDS or not fields[1].isdecimal():
        return None
    name, memory, driver, capability = fields
    return Gpu(name, int(memory) * _MIB, driver, capability, parse_gpu(f"{name}, {capability}"))


def parse_gpu(line: str) -> str | None:
    """Return the name in `ENGINE_HARDWARE` of a line of nvidia-smi such as ``NVIDIA H100 80GB HBM3, 9.0``."""
    model, _, capability = line.rpartition(",")
    words = re.split(r"[\s-]+", model.lower())
    for hardware in ENGINE_HARDWARE.values():
        if hardware.name in words and capability.strip().replace(".", "") == str(hardware.generation.capability):
            return hardware.name
    return None
