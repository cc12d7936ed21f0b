"""Measure rounding the inputs of W8A8: `round_inputs` against plain torch and a copy of the input to float32.

    python benchmarks/quantized_inputs.py

Every call reads another input, and all inputs together are larger than the caches. Times are medians over the rounds.
"""

from __future__ import annotations

import statistics

import click
import torch
from timing import Contender, measure, ratio
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.inputs import round_inputs
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import SCHEMES, ActivationSpec

INPUTS = 8
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE = 0.01


@click.command()
@click.option("--m", default="1,16,2048", show_default=True, help="Rows of the input.")
@click.option("--k", default=2048, show_default=True, help="Columns.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--rounds", default=7, show_default=True, help="Number of samples of each implementation.")
@click.option("--seconds", default=0.05, show_default=True, help="Approximate time of a sample.")
def main(m: str, k: int, dtype: str, rounds: int, seconds: float) -> None:
    """Print nanoseconds per element for every kind of input that schemes declare."""
    click.echo(f"{native.isa()}, {threads.count()} threads, torch {torch.__version__}, {dtype}, K={k}, ns per element")
    click.echo(f"{'':<14} {'M':>5} {'copy':>8} {'torch':>8} {'ours':>8} {'x torch':>8}")
    specs = {n: s.activation for n, s in SCHEMES.items() if s.activation is not None and s.activation.scale is FLOAT32}
    with torch.inference_mode():
        for rows in (int(number) for number in m.split(",")):
            inputs = [torch.randn(rows, k).to(DTYPES[dtype]) for _ in range(INPUTS)]
            for name, spec in specs.items():
                samples = measure(contenders(spec, inputs), 1, 1, rounds, seconds)
                ns = {key: statistics.median(values) / (rows * k) * 1e9 for key, values in samples.items()}
                click.echo(
                    f"{name:<14} {rows:>5} {ns['copy']:8.3f} {ns['torch']:8.2f} {ns['ours']:8.3f} "
                    f"{ratio(samples['torch'], samples['ours']):8.1f}"
                )


def contenders(spec: ActivationSpec, inputs: list[Tensor]) -> list[Contender]:
    """Return the copy, plain torch and our kernel, each over all inputs."""
    scale, nbytes = None if spec.dynamic else torch.tensor(SCALE), inputs[0].nbytes
    return [
        Contender("copy", lambda _, x: x.to(torch.float32, copy=True), inputs, nbytes),
        Contender("torch", lambda _, x: round_inputs(x, spec, scale, impl="reference"), inputs, nbytes),
        Contender("ours", lambda _, x: round_inputs(x, spec, scale, impl="cpu"), inputs, nbytes),
    ]


if __name__ == "__main__":
    main()
