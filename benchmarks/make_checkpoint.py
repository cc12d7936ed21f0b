"""Make a random BF16 Llama checkpoint of a given shape, without building the model.

    python benchmarks/make_checkpoint.py OUT                      # 1.1B parameters (TinyLlama's shape)
    python benchmarks/make_checkpoint.py OUT --layers 44          # about 2.0B

Weights are Gaussian with a few outliers, from a fixed seed: equal arguments make equal files.
"""

from __future__ import annotations

from pathlib import Path

import click

from minifloat.evaluate.bench.shapes import Shape, write_random


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--hidden", default=2048, show_default=True)
@click.option("--inner", default=5632, show_default=True)
@click.option("--layers", default=22, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--kv-heads", default=4, show_default=True)
@click.option("--vocab", default=32000, show_default=True)
def main(out: Path, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> None:
    """Write the checkpoint OUT."""
    shape = Shape("llama", hidden, inner, layers, heads, kv_heads, hidden // heads, vocab, tied=False)
    write_random(out, shape)
    nbytes = sum(tensor.nbytes for tensor in shape.tensors)
    click.echo(f"{nbytes / 2e9:.2f}B parameters, {nbytes:,} bytes: {out}")


if __name__ == "__main__":
    main()
