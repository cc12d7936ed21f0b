"""Measure the cost of observing activations: forward passes with an observer against plain forward passes.

    python benchmarks/make_checkpoint.py /tmp/1b            # 1.1B parameters of the shape of a Llama
    python benchmarks/calibrate.py /tmp/1b
    python benchmarks/calibrate.py /tmp/1b --device cuda --seq-len 2048

Every round runs the same sequence without an observer and with each kind of observer, in one process, so that other
load on the machine affects all of them alike; the best time of each is printed. The plain pass runs without lm_head, as
calibration does. Its TFLOP/s are printed beside those of a single matrix product, to show that the baseline is strong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import PreTrainedModel

from minifloat.calibration.observe import Observer
from minifloat.kernels import native
from minifloat.model.runtime.load import LoadOptions, load

KINDS: dict[str, dict[str, Any]] = {
    "max": {},
    "max and histograms": {"histogram": True},
    "max and channels": {"per_channel": True},
}


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--seq-len", default=512, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=0, help="Number of torch threads.  [default: torch's choice]")
def main(checkpoint: Path, seq_len: int, rounds: int, device: str, threads: int) -> None:
    """Measure the cost of observing the activations of CHECKPOINT."""
    if threads:
        torch.set_num_threads(threads)
    model = load(checkpoint, LoadOptions(device=device))
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, seq_len), device=device)
    observers = {name: Observer(model, **options) for name, options in KINDS.items()}
    times: dict[str, list[float]] = {name: [] for name in ("plain", *KINDS)}
    for turn in range(rounds + 1):  # round 0 warms up
        for name, seconds in times.items():
            elapsed = timed(partial(forward, model, ids, observers.get(name)), device)
            if turn:
                seconds.append(elapsed)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and ".layers." in name)
    plain = min(times["plain"])
    print(f"{checkpoint}: {weights / 1e9:.2f}G weights in layers, {model.dtype}, {seq_len} tokens, {rounds} rounds")
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, native library: {native.isa()}")
    print(f"plain: {plain:.3f} s, {seq_len / plain:.0f} tokens/s, {2e-12 * weights * seq_len / plain:.3f} TFLOP/s")
    print(f"one matrix product of the same dtype: {product_rate(model, seq_len, device):.3f} TFLOP/s\n")
    print(f"{'observed':22}{'seconds':>9}{'ratio':>8}")
    for name in KINDS:
        print(f"{name:22}{min(times[name]):9.3f}{min(times[name]) / plain:8.3f}")


@torch.inference_mode()
def forward(model: PreTrainedModel, ids: Tensor, observer: Observer | None) -> None:
    if observer is None:
        model.base_model(input_ids=ids, use_cache=False)
        return
    with observer:
        observer.run(ids)


def timed(run: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def product_rate(model: PreTrainedModel, rows: int, device: str) -> float:
    """Return the TFLOP/s of one product with the shape of the model's largest linear: the best of ten runs."""
    shape = max(
        (tuple(p.shape) for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2),
        key=lambda s: s[0] * s[1],
    )
    x = torch.randn(rows, shape[1], dtype=model.dtype, device=device)
    w = torch.randn(shape, dtype=model.dtype, device=device)
    best = min(timed(lambda: torch.nn.functional.linear(x, w), device) for _ in range(10))
    return 2e-12 * rows * shape[0] * shape[1] / best


if __name__ == "__main__":
    main()
