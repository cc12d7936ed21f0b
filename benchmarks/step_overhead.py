"""Measure the time of an engine's step that is not the model's: scheduling, inputs, sampling, texts, deliveries.

    python benchmarks/step_overhead.py                    # on a CPU
    python benchmarks/step_overhead.py --device cuda      # on a GPU

The engine's own code runs, with its runner for GPUs and a model of one tiny layer. On a CPU even that layer is left
out and the vocabulary is small, so that a step is the work of the host alone. On a GPU the layer runs as a graph, the
vocabulary has 128256 tokens, and a step includes the launches, the copies and the sampler of the device.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from gpu_model import DRY_SHAPE
from torch import Tensor

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.evaluate.bench.shapes import write_random
from minifloat.evaluate.bench.worker import BatchTimings
from minifloat.evaluate.bench.workload import Workload

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8, "seed": 1},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
    "temperature 0.6, top_k 20": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 1},
}
INPUT = 8


def median_step(engine: Engine, load: Workload, batch: int, params: SamplingParams) -> tuple[float, float]:
    """Return the seconds of a step in which each sequence gets a token: as the engine reports it, and by the clock."""
    recorder = BatchTimings()
    walls = []
    for number in range(load.rounds + 1):
        engine.observer = recorder if number else None
        started = time.perf_counter()
        engine.generate(load.prompts(number, batch, engine.info.vocab_size), params)
        walls.append((time.perf_counter() - started) / load.output_len)
    steps = [each.seconds for each in recorder.steps if each.generation_tokens == batch and not each.prompt_tokens]
    return statistics.median(steps), statistics.median(walls[1:])


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option("--batches", default="1,16,64,256", show_default=True)
@click.option("--output-len", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(device: str, batches: str, output_len: int, rounds: int) -> None:
    """Print microseconds per step, the same divided by the batch, and of a step with its share of `generate`."""
    sizes = tuple(int(size) for size in batches.split(","))
    load = Workload(INPUT, output_len, sizes, rounds)
    on_cpu = device == "cpu"
    shape = replace(DRY_SHAPE, layers=1, vocab=64 if on_cpu else 128256)
    click.echo(f"{'sampling':<28} {'batch':>6} {'us/step':>9} {'us/sequence':>12} {'us with generate':>17}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = write_random(Path(folder) / "model", shape)
        if on_cpu:
            logits = torch.randn(max(sizes), shape.vocab, generator=torch.Generator().manual_seed(0))

            def no_model(decoder: object, cache: object, inputs: Any) -> Tensor:
                return logits[: len(inputs.rows)]

            stack.enter_context(patch("minifloat.engine.device_runner.step", no_model))
        engine = Engine(
            path,
            EngineOptions(
                device=device,
                runner="device",
                max_num_seqs=max(sizes),
                max_model_len=load.input_len + load.output_len,
                max_num_batched_tokens=max(sizes) * INPUT + 1,
                prefix_cache=False,
            ),
        )
        for name, values in SAMPLING.items():
            params = SamplingParams(max_tokens=output_len, ignore_eos=True, **values)
            for batch in sizes:
                seconds, wall = median_step(engine, load, batch, params)
                click.echo(
                    f"{name:<28} {batch:>6} {seconds * 1e6:>9.0f} {seconds * 1e6 / batch:>12.1f} {wall * 1e6:>17.0f}"
                )


if __name__ == "__main__":
    main()
