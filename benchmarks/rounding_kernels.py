"""Measure the kernels of calibrated rounding: `gram` and `round_with_feedback`, against torch and against the machine.

    python benchmarks/rounding_kernels.py
    python benchmarks/rounding_kernels.py --k 4096 --t 8192 --n 4096 --isa avx2

Rates count 2 T K K operations for every Gram product, also where half of them is computed, and N K (K - 1) for rounding
with feedback. "of peak" divides by what torch reaches on this machine in a square product: in the dtype of the Gram
product, and for rounding half of that in float32, because its multiplications and additions are not fused. Every round
runs all contenders in turn; ratios are medians over the rounds, rates those of the best round.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

import click
import torch
from timing import ratio
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.rounding import gram, round_with_feedback
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1
from minifloat.numerics.granularity import GROUP_32

#: Columns that GPTQ in torch rounds before it updates the columns behind them with one product.
TORCH_BLOCK = 128
GRAM_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Runs = Mapping[str, Callable[[], object]]


@click.command()
@click.option("--t", default=4096, show_default=True, help="Rows of the activations.")
@click.option("--k", default=2048, show_default=True, help="Columns of the activations and of the weight.")
@click.option("--n", default=2048, show_default=True, help="Rows of the weight.")
@click.option("--isa", default="", help="Instruction set of our kernels, by default the fastest.")
@click.option("--rounds", default=5, show_default=True, help="Number of samples of each implementation.")
def main(t: int, k: int, n: int, isa: str, rounds: int) -> None:
    """Print a line per implementation: TFLOP/s, share of the peak, and speed relative to torch."""
    with native.using(isa) if isa else contextlib.nullcontext():
        click.echo(f"{native.isa()}, {threads.count()} threads, torch {torch.__version__}, T={t}, K={k}, N={n}")
        click.echo(f"{'':<12} {'':<14} {'TFLOP/s':>8} {'of peak':>8} {'x torch':>8}")
        peaks = {name: peak(dtype, rounds) for name, dtype in GRAM_DTYPES.items()}
        for name, dtype in GRAM_DTYPES.items():
            show(f"gram {name}", gram_runs(t, k, dtype), 2.0 * t * k * k, peaks[name], rounds)
        show("feedback", feedback_runs(n, k), float(n * k * (k - 1)), peaks["fp32"] / 2, rounds)


def peak(dtype: torch.dtype, rounds: int) -> float:
    """Return the operations per second of torch's product of square matrices."""
    size = 2048
    x, weight = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    samples = measure({"linear": lambda: torch.nn.functional.linear(x, weight)}, rounds)
    return 2.0 * size**3 / min(samples["linear"])


def gram_runs(t: int, k: int, dtype: torch.dtype) -> Runs:
    """Return the Gram product in torch, which rounds bfloat16 results, ours, and ours of one input with itself."""
    x, y, out = torch.randn(t, k).to(dtype), torch.randn(t, k).to(dtype), torch.zeros(k, k)
    return {
        "torch": lambda: out.add_(x.T @ y),
        "x, y": lambda: gram(x, y, out),
        "x, x": lambda: gram(x, x, out),
    }


def feedback_runs(n: int, k: int) -> Runs:
    """Return GPTQ's inner loop in torch, by blocks of columns, and ours."""
    weight, feedback = torch.randn(n, k), torch.randn(k, k).triu(1) * k**-0.5
    group = GROUP_32.cols or k
    scales = torch.rand(n, -(-k // group)) + 0.5
    groups = torch.arange(k, dtype=torch.int32) // group
    return {
        "torch": lambda: torch_feedback(weight, scales, groups, feedback),
        "ours": lambda: round_with_feedback(weight, scales, groups, feedback, E2M1),
    }


def torch_feedback(weight: Tensor, scales: Tensor, groups: Tensor, feedback: Tensor) -> Tensor:
    """Round a weight as GPTQ's published code does: a loop within a block, one product for the columns behind it."""
    work, codes = weight.clone(), torch.empty(weight.shape, dtype=torch.uint8)
    columns = groups.tolist()
    for begin in range(0, weight.shape[1], TORCH_BLOCK):
        end = min(begin + TORCH_BLOCK, weight.shape[1])
        errors = torch.empty(weight.shape[0], end - begin)
        for j in range(begin, end):
            scale = scales[:, columns[j]]
            codes[:, j] = encode(work[:, j] / scale, E2M1)
            errors[:, j - begin] = weight[:, j] - decode(codes[:, j], E2M1) * scale
            work[:, j + 1 : end].addr_(errors[:, j - begin], feedback[j, j + 1 : end])
        work[:, end:].addmm_(errors, feedback[begin:end, end:])
    return codes


def measure(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run, one sample per round after one that is not counted."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                samples[name].append(time.perf_counter() - start)
    return samples


def show(kernel: str, runs: Runs, operations: float, peak_rate: float, rounds: int) -> None:
    samples = measure(runs, rounds)
    for name, seconds in samples.items():
        rate = operations / min(seconds)
        click.echo(
            f"{kernel:<12} {name:<14} {rate / 1e12:8.3f} {rate / peak_rate:8.2f} "
            f"{ratio(samples['torch'], seconds):8.2f}"
        )


if __name__ == "__main__":
    main()
