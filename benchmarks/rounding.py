"""Time and peak memory of rounding with data, beside the calibration's forward passes alone, in one process each.

    python benchmarks/make_checkpoint.py /tmp/llama-2 --layers 2
    OMP_NUM_THREADS=2 python benchmarks/rounding.py /tmp/llama-2 --method match --scheme mxfp4

The text is random tokens: neither time nor memory depends on what it says. Memory is the largest resident set of the
process (VmHWM), and what of it was there before the walk began; the bar is one layer with its Hessians and their
factors, which is printed beside it. A model has one comparison at its end whatever the number of its layers, so the
time of a model of two layers is also given without it.
"""

from __future__ import annotations

import cProfile
import pstats
import re
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from minifloat.calibration.calibrate import calibrate_layerwise
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import compressed_tensors
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import get_scheme
from minifloat.quantize.rounding.methods import RoundingOptions, get_method
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.texts import SplitText


def resident(field: str) -> int:
    """Return a field of /proc/self/status in bytes: ``VmRSS`` or ``VmHWM``."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def reset_peak() -> None:
    """Forget the largest resident set so far."""
    Path("/proc/self/clear_refs").write_text("5")


def layer_bytes(plan: QuantizationPlan) -> tuple[int, int]:
    """Return the bytes of one layer's BF16 weights, and of its widest Hessian, drift, float64 copy and factors."""
    parts = [part for tensor in plan.tensors for part in tensor.parts if re.search(r"\.0\.", part.module)]
    widest = max(part.shape[1] for part in parts)
    return sum(2 * part.shape[0] * part.shape[1] for part in parts), widest * widest * (4 + 4 + 8 + 8 + 4)


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--method", default="match", show_default=True)
@click.option("--scheme", default="mxfp4", show_default=True)
@click.option("--samples", default=256, show_default=True)
@click.option("--seq-len", default=256, show_default=True)
@click.option("--no-fold", is_flag=True)
@click.option("--profile", is_flag=True, help="Print the functions that take most of the time.")
def main(model: Path, method: str, scheme: str, samples: int, seq_len: int, no_fold: bool, profile: bool) -> None:
    """Measure MODEL."""
    with Checkpoint.open(model) as checkpoint:
        rng = np.random.default_rng(0)
        ids = rng.integers(3, int(checkpoint.config["vocab_size"]), (samples + samples // 8, seq_len)).tolist()
        sequences = tuple(map(tuple, ids))
        kept, held_out = CalibrationSet(sequences[:samples]), CalibrationSet(sequences[samples:])
        plan = make_plan(checkpoint, get_scheme(scheme), compressed_tensors.WRITER)
        run = CalibrateOptions(max_memory=1 << 62)
        started = time.perf_counter()
        calibrate_layerwise(CalibrationModel(checkpoint, run), kept, run)
        forward = time.perf_counter() - started
        before = resident("VmRSS")
        reset_peak()
        options = RoundingOptions(get_method(method), fold=not no_fold)
        profiler = cProfile.Profile()
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            if profile:
                profiler.enable()
            layers_done = started

            def progress(*_: object) -> None:
                nonlocal layers_done
                layers_done = time.perf_counter()

            with round_checkpoint(
                checkpoint, plan, SplitText(kept, held_out, held_out), options, Path(folder) / "work", progress
            ):
                pass
            profiler.disable()
            seconds = time.perf_counter() - started
            layers = layers_done - started
    weights, hessians = layer_bytes(plan)
    print(f"{model.name}, {scheme}, {method}, {kept.tokens:,} tokens and {held_out.tokens:,} held out")
    print(f"calibration's forward passes {forward:.1f} s; rounding {seconds:.1f} s: {seconds / forward:.2f}x")
    print(f"without the comparison of the models at the end {layers:.1f} s: {layers / forward:.2f}x")
    peak = resident("VmHWM")
    print(
        f"peak {peak / 2**20:.0f} MiB, of which {before / 2**20:.0f} MiB before the walk; "
        f"one layer {weights / 2**20:.0f} MiB, its Hessians and factors {hessians / 2**20:.0f} MiB"
    )
    if profile:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
