"""The estimated beside the measured time of rounding with data: one linear by its width, and a whole model.

    OMP_NUM_THREADS=2 python benchmarks/rounding_time.py
    OMP_NUM_THREADS=2 python benchmarks/rounding_time.py --model examples/storybook-4m --samples 142

Rates are measured before each, as a run does. The bar is a factor of 1.5 either way. A linear is timed without the
passes of the model: sums, factorization, target, codes and errors. Of a model the writing of its text is timed too.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click
import torch

from minifloat.checkpoint import Checkpoint
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.amount import enough_text
from minifloat.quantize.cost import data_cost
from minifloat.quantize.estimate import DEFAULT_TEXT, Group, group_work
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.own_text import prepare_texts
from minifloat.quantize.planner import planned_source
from minifloat.quantize.rounding.feedback import factorize
from minifloat.quantize.rounding.layer import output_errors
from minifloat.quantize.rounding.methods import DEFAULT_ROUNDING, Grid, SharedInput, compensate, error_of, matched
from minifloat.quantize.rounding.rates import measure_rates
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.statistics import HELD_OUT_ROWS, Accumulator, Rows
from minifloat.quantize.rounding.texts import SplitText

SCHEME = SCHEMES["mxfp4"]


def show(what: str, estimated: float, measured: float) -> None:
    print(f"{what}: estimated {estimated:.1f} s, measured {measured:.1f} s, {measured / estimated:.2f}x", flush=True)


@torch.inference_mode()
def one_linear(width: int, rows: int, tokens: int) -> None:
    """Time the rounding of a weight that adds to the residual stream."""
    rates = measure_rates(SCHEME, torch.bfloat16)
    estimated = group_work(Group(rows, width, 1, is_expert=False), tokens, follows=True)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, width, generator=generator).bfloat16()
    reference = inputs + 0.1
    weight = (0.02 * torch.randn(rows, width, generator=generator)).bfloat16()
    held_out = Rows(inputs[:HELD_OUT_ROWS].float(), reference[:HELD_OUT_ROWS].float())
    started = time.perf_counter()
    sums = Accumulator(width, drift=True, adding=weight)
    for first in range(0, tokens, 256):
        sums.add(Rows(inputs[first : first + 256], reference[first : first + 256]))
    statistics = sums.finish()
    summed = time.perf_counter()
    feedback = factorize(statistics.hessian, "benchmark")
    factorized = time.perf_counter()  # one of two factorizations: `matched` makes the other
    grid = Grid.of(weight, SCHEME.weight, None)
    target, _ = matched(weight.float(), SharedInput(statistics, held_out))
    [codes] = compensate(target, [grid], feedback)
    output_errors(weight.float(), [grid.nearest, codes], held_out)
    error_of(weight, codes)
    ended = time.perf_counter()
    name = f"one linear [{rows}, {width}], {tokens:,} tokens"
    show(f"{name}, sums", estimated.gram / rates.gram + estimated.forward / rates.forward, summed - started)
    show(f"{name}, factorization", estimated.factor / rates.factor / 2, factorized - summed)
    show(f"{name}, all", estimated.seconds(rates), ended - started)


def whole_model(model: Path, samples: int) -> None:
    """Time the writing of text and the rounding of a model."""
    with tempfile.TemporaryDirectory() as folder, Checkpoint.open(model) as checkpoint:
        out, files = Path(folder) / "out", (Path(folder) / "text", Path(folder) / "work")
        with planned_source(model, out, QuantizeOptions()) as planner:
            plan, _ = planner.chosen(SCHEME)
            text = enough_text(replace(DEFAULT_TEXT, samples=samples), plan, checkpoint.config)
            cost = data_cost(checkpoint, plan, ["self"], text, DEFAULT_ROUNDING, out, files)
            started = time.perf_counter()
            texts = prepare_texts(checkpoint, "self", text, files[0])
            written = time.perf_counter()
            with round_checkpoint(checkpoint, plan, SplitText.of(texts, 0.1), DEFAULT_ROUNDING, files[1]):
                rounded = time.perf_counter()
    assert cost.writing is not None
    show(f"{model.name}, {samples} sequences, writing", cost.writing.seconds, written - started)
    show(f"{model.name}, {samples} sequences, rounding", cost.seconds, rounded - written)


@click.command(help=__doc__.split("\n")[0])
@click.option("--model", type=click.Path(path_type=Path), help="A whole model in place of single linears.")
@click.option("--samples", default=142, show_default=True, help="Sequences of 256 tokens.")
@click.option("--width", "widths", multiple=True, type=int, help="Input channels.  [default: 4096 and 18944]")
@click.option("--rows", default=256, show_default=True, help="Outputs of a linear.")
@click.option("--tokens", default=4096, show_default=True, help="Tokens for the statistics of a linear.")
def main(model: Path | None, samples: int, widths: tuple[int, ...], rows: int, tokens: int) -> None:
    """Measure."""
    if model is not None:
        whole_model(model, samples)
        return
    for width in widths or (4096, 18944):
        one_linear(width, rows, tokens)


if __name__ == "__main__":
    main()
