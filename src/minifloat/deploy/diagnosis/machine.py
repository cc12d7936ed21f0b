"""The processor, its kernels, memory, disk, threads, limits of control groups, and the GPUs that nvidia-smi names."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.kernels import native, processors
from minifloat.kernels.memory import available_memory, memory_limit

_CPUINFO = Path("/proc/cpuinfo")
#: Instruction set of the kernels, fastest first -> the flags in Linux's cpuinfo that it takes (csrc/processor.h).
_AVX512 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni", "avx512vbmi", "gfni"}
_FLAGS = {
    "amx": _AVX512_VNNI | {"avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": _AVX512_VNNI | {"avx512_bf16"},
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "neon_bf16": {"asimd", "bf16"},
}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Machine:
    """What a machine has, of what matters to quantizing and serving."""

    processor: str
    cores: int
    cpu_quota: float | None  # processors' worth of time that control groups allow; None without a limit
    threads: int
    openmp: tuple[str, ...]
    instruction_sets: tuple[str, ...]
    instruction_set: str | None  # the one in use; None without the native library
    not_built: str
    kernels_missing: str
    memory: int
    memory_free: int  # bytes that this process can still take
    memory_limit: int | None  # bytes that control groups allow; None without a limit
    disk_free: int
    huge_pages: str | None  # "always", "madvise" or "never"; None where the system does not say


def examine_machine() -> Machine:
    """Examine this machine; torch must be imported already if its OpenMP runtime is to be seen."""
    library = native.load()
    return Machine(
        processor_name(),
        processors.available(),
        processors.cgroup_quota(),
        processors.limit(),
        processors.openmp_runtimes(),
        () if library is None else library.isas,
        None if library is None else library.isa,
        "" if library is None else not_built(library.built),
        native.why_unavailable() if library is None else "",
        psutil.virtual_memory().total,
        available_memory(),
        memory_limit(),
        shutil.disk_usage(Path.cwd()).free,
        huge_pages(),
    )


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of the processor; the architecture where the system does not say."""
    return _cpu_entry(cpuinfo, "model name") or platform.processor() or platform.machine()


def not_built(built: tuple[str, ...], cpuinfo: Path = _CPUINFO) -> str:
    """Return the fastest instruction set that the processor has, if it is not among those built; else nothing."""
    flags = set((_cpu_entry(cpuinfo, "flags") or _cpu_entry(cpuinfo, "Features")).split())
    if _cpu_entry(cpuinfo, "vendor_id") == "GenuineIntel" and "amx_bf16" not in flags:
        flags.discard("avx512_bf16")  # float32 is faster there
    fastest = next((name for name, needed in _FLAGS.items() if needed <= flags), "")
    return "" if fastest in built else fastest


def _cpu_entry(cpuinfo: Path, key: str) -> str:
    """Return what Linux's file says of the first processor under a key; nothing where it does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    values = (value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == key)
    return next(values, "")


def huge_pages(file: Path = _HUGE_PAGES) -> str | None:
    """Return when the system gives transparent huge pages, the word in brackets of Linux's file."""
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return None
    return text.partition("[")[2].partition("]")[0] or None


_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")
_SECONDS = 20.0
_FIELDS = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory: int
    driver: str
    capability: str
    hardware: str | None  # its name for `check` and `plan`; None: the tables do not have it


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
