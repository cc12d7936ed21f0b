"""Sections "products", "more-rows" and "peers" of `benchmarks/gpu.py`: matrix products of Llama's shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpu_contenders import BASELINE, OURS, PEERS, make
from gpu_run import Run, clock
from timing import Contender

SHAPES = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
DRY_SHAPES = {"tiny": (256, 128), "tiny block": (128, 384)}
FEW_ROWS, MORE_ROWS = (1, 4, 16), (64, 256, 1024, 4096, 8192)
DRY_FEW, DRY_MORE = (1, 16), (17,)


def few_rows(run: Run) -> None:
    """Measure our kernels and the baseline at the few rows of decode, where the memory bandwidth is the limit."""
    _table(run, "products", DRY_FEW if run.dry else FEW_ROWS, OURS)


def more_rows(run: Run) -> None:
    """Measure our kernels and the baseline at the many rows of prefill, where arithmetic is the limit."""
    _table(run, "products", DRY_MORE if run.dry else MORE_ROWS, OURS)


def peers(run: Run) -> None:
    """Measure other libraries and the baseline on the shapes of the 8B model."""
    shapes = DRY_SHAPES if run.dry else {name: shape for name, shape in SHAPES.items() if name.startswith("8B")}
    _table(run, "peers", DRY_FEW if run.dry else (1, 16, 64, 1024), PEERS, shapes)


def _table(
    run: Run, section: str, ms: Sequence[int], names: Sequence[str], shapes: dict[str, tuple[int, int]] | None = None
) -> None:
    for shape_name, (n, k) in (shapes or (DRY_SHAPES if run.dry else SHAPES)).items():
        weight = torch.randn(n, k, device=run.device).mul_(0.02).bfloat16()
        baseline: dict[int, float] = {}
        for name in (BASELINE, *names):
            if run.left <= 0:
                run.log(section, what=f"{shape_name} from {name} on", failed="no time left")
                return
            with run.attempt(section, f"{shape_name} {name}"):
                contender = make(run, name, weight)
                for m in ms:
                    with run.attempt(section, f"{shape_name} {name} M={m}"):
                        _row(run, section, shape_name, (n, k), m, contender, baseline)
                del contender
        if run.device.type == "cuda":
            torch.cuda.empty_cache()


def _row(
    run: Run, section: str, name: str, shape: tuple[int, int], m: int, contender: Contender, baseline: dict[int, float]
) -> None:
    """Measure and log one product; `baseline` maps the number of rows to the baseline's seconds."""
    n, k = shape
    x = torch.randn(m, k, device=run.device).bfloat16()
    with torch.inference_mode():
        timing = clock(run, [lambda w=w: contender.multiply(x, w) for w in contender.weights])  # type: ignore[misc]
    if contender.name == BASELINE:
        baseline[m] = timing.seconds
    moved = contender.nbytes + 2 * m * (n + k)
    run.log(
        section,
        shape=name,
        n=n,
        k=k,
        m=m,
        contender=contender.name,
        us=timing.seconds * 1e6,
        spread=timing.spread,
        samples=timing.samples,
        gbps=moved / timing.seconds / 1e9,
        read_share=run.share("read_gbps", moved / timing.seconds / 1e9),
        tflops=2 * m * n * k / timing.seconds / 1e12,
        peak_share=run.share("peak_tflops", 2 * m * n * k / timing.seconds / 1e12),
        ratio=baseline[m] / timing.seconds if m in baseline else None,
    )
