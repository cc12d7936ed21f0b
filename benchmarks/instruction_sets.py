"""Limit torch to the same instruction set as our kernels, and describe the machine that is measured.

If our kernels were limited to AVX2 while torch kept AMX, the benchmark would compare two machines. torch reads its
limits once, when it is imported, so the process restarts itself with them; this module therefore imports no torch.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from pathlib import Path

from minifloat.kernels import native

#: Our instruction set -> the limits of torch's three libraries: oneDNN, torch's own kernels (ATen), MKL.
TORCH_LIMITS: dict[str, dict[str, str]] = {
    "baseline": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_vnni": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_bf16": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
    },
    "amx": {},
}


def force(isa: str | None) -> None:
    """Limit our kernels and torch to `isa` (or ``MINIFLOAT_ISA``); without either, both use everything available.

    Returns if this process is limited already, and otherwise restarts it with the limits in its environment.

    Raises:
        KernelUnavailable: If the native library does not know the instruction set or this processor lacks it.
    """
    isa = isa or os.environ.get("MINIFLOAT_ISA")
    if not isa:
        return
    limits = {"MINIFLOAT_ISA": isa, **TORCH_LIMITS.get(isa, {})}
    library = native.load()
    if library is not None:
        library.with_isa(isa)
    if any(os.environ.get(key) != value for key, value in limits.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | limits)


def machine(threads: int) -> dict[str, str | int | float]:
    """Return the facts about the machine and the software that every reported figure depends on."""
    import torch  # after force()

    limits = {key: os.environ[key] for key in TORCH_LIMITS["avx2"] if key in os.environ}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "instruction_set": native.isa(),
        "forced": "MINIFLOAT_ISA" in os.environ,
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_limits": " ".join(f"{key}={value}" for key, value in limits.items()) or "none",
        "python": platform.python_version(),
        "system": platform.platform(),
        "huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "load_before": os.getloadavg()[0],
    }


def describe(facts: dict[str, str | int | float]) -> str:
    """Return the facts of `machine` in three lines."""
    forced = "forced" if facts["forced"] else "the best here"
    return (
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, 2 MB pages: {facts['huge_pages']}, "
        f"load {facts['load_before']:.2f}\n"
        f"kernels: {facts['instruction_set']} ({forced}); torch {facts['torch']}, {facts['torch_capability']}, "
        f"limited by: {facts['torch_limits']}\n"
        f"{facts['date']}, Python {facts['python']}, {facts['system']}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _chosen(setting: Path) -> str:
    """Return the bracketed word of a kernel setting, as in "always [madvise] never"."""
    if not setting.exists():
        return "unknown"
    return setting.read_text().partition("[")[2].partition("]")[0]
