"""The gains of quantization, measured: memory and latency of two checkpoints on the same engine.

Names are resolved on first use, so that commands can list options without the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.evaluate.bench.gains import GainsReport as GainsReport
    from minifloat.evaluate.bench.gains import bench_checkpoint as bench_checkpoint
    from minifloat.evaluate.bench.workload import BenchOptions as BenchOptions
    from minifloat.evaluate.bench.workload import Workload as Workload

_HOMES = {"GainsReport": "gains", "bench_checkpoint": "gains", "BenchOptions": "workload", "Workload": "workload"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
