"""Sections "environment" and "ceilings" of `benchmarks/gpu.py`: versions, device, read bandwidth, peak BF16 rate."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from functools import partial

import torch
from gpu_run import Run, clock

from minifloat._version import __version__

READ_BYTES, PEAK_SIDE = 4 << 30, 8192
PACKAGES = ("torch", "triton", "transformers", "numpy", "gemlite", "vllm")


def environment(run: Run) -> None:
    """Log the versions of the software and the device."""
    versions = {"minifloat": __version__}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    run.log("environment", python=platform.python_version(), **versions, cuda=torch.version.cuda or "none")
    if run.dry:
        run.log("device", name=platform.processor() or platform.machine())
        return
    properties = torch.cuda.get_device_properties(run.device)
    run.log(
        "device",
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_gib=properties.total_memory / 2**30,
        l2_mib=properties.L2_cache_size / 2**20,
    )
    with run.attempt("device", "nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv"]
        shown = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
        run.log("device", nvidia_smi=f"{shown[0]}: {shown[1]}")


def ceilings(run: Run) -> None:
    """Log the read bandwidth (a sum over memory far larger than the caches) and the rate of a large BF16 product."""
    data = torch.ones((1 << 20 if run.dry else READ_BYTES) // 4, dtype=torch.float32, device=run.device)
    read = clock(run, [partial(torch.sum, data)])
    run.facts["read_gbps"] = data.nbytes / read.seconds / 1e9
    run.log("ceiling", what="read-only sum", gb=data.nbytes / 1e9, gbps=run.facts["read_gbps"], spread=read.spread)
    del data
    side = 64 if run.dry else PEAK_SIDE
    a, b = (torch.randn(side, side, device=run.device).bfloat16() for _ in range(2))
    peak = clock(run, [partial(torch.nn.functional.linear, a, b)])
    run.facts["peak_tflops"] = 2 * side**3 / peak.seconds / 1e12
    run.log("ceiling", what=f"BF16 {side}^3", tflops=run.facts["peak_tflops"], spread=peak.spread)
