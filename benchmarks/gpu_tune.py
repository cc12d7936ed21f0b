"""Measure which configurations are fastest on this GPU, and write the table that `choose` reads.

    python benchmarks/gpu_tune.py                       # shapes of an 8B Llama, all forms: an hour
    python benchmarks/gpu_tune.py --shape 8192x8192 --form MXFP4 --rows 16

Run it by hand, for a device whose arithmetic choices are slow; never while a model is served. A candidate differs from
the arithmetic's choice in one respect, and replaces it if it takes less than 97% of its time. Candidates that the
device cannot run are skipped.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
from gpu_run import replay

from minifloat.errors import KernelUnavailable, MinifloatError, UsageError
from minifloat.kernels.linear.triton import config as configs
from minifloat.kernels.linear.triton.config import BUCKETS, LARGE, MAX_SPLIT, Config, Device, why_not
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm
from minifloat.kernels.linear.triton.weight import GpuWeight, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

#: q/k/v, out, gate/up and down of an 8B Llama.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
#: A scheme whose weights have the form.
SCHEME_NAMES = {
    GpuForm.FP8: "fp8",
    GpuForm.FP8_BLOCK: "fp8-block",
    GpuForm.MXFP8: "mxfp8",
    GpuForm.MXFP4: "mxfp4",
    GpuForm.NVFP4: "nvfp4",
}
_WORTH_IT = 0.97
_ROTATED_BYTES = 256 << 20  #: bytes of weights in rotation, so that they come from memory rather than a cache
_SAMPLES = 20

Table = dict[tuple[GpuForm, int, int, int, int], Config]


def tune(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    forms: Sequence[GpuForm] = tuple(GpuForm),
    rows: Sequence[int] = BUCKETS,
    report: Callable[[str], None] = print,
) -> Table:
    """Measure products with bfloat16 inputs on the current device."""
    reason = why_not("cuda")
    if reason:
        raise KernelUnavailable(f"tuning measures on a GPU: {reason}")
    if not set(rows) <= set(BUCKETS):
        raise UsageError(f"expected numbers of rows of {', '.join(map(str, BUCKETS))}, got {list(rows)}")
    device = Device.of(torch.device("cuda", torch.cuda.current_device()))
    table: Table = {}
    for form in forms:
        for shape in shapes:
            weights = _weights(form, shape)
            for most in rows:
                base = configs.by_arithmetic(form, shape, most, 1, device)
                times = {
                    config: _seconds(config, weights, most) for config in candidates(base, form, shape, most, device)
                }
                best = min(times, key=lambda config: times[config])
                gain = times[base] / times[best] if math.isfinite(times[best]) else 1.0
                report(f"{form.name} {shape[0]}x{shape[1]} M={most}: {times[best] * 1e6:.1f} us, {gain:.2f}x by {best}")
                if times[best] < _WORTH_IT * times[base]:
                    table[(form, *shape, most, 1)] = best
    return table


def candidates(base: Config, form: GpuForm, shape: tuple[int, int], rows: int, device: Device) -> Iterator[Config]:
    """Yield the arithmetic's choice first, then configurations that differ from it in one respect."""
    yield base
    if not base.is_large:
        yield LARGE
    else:
        base = configs.cut(Config(128, 128, 1, 8, 0, 1), form, shape, rows, 1, device)
        yield base
    for split in {max(1, base.split // 2), min(2 * base.split, MAX_SPLIT)} - {base.split}:
        yield replace(base, split=split)
    for stages in {2, 3, 4, 6} - {base.stages}:
        yield replace(base, stages=stages)
    for rows_n, warps in ((64, 4), (128, 4), (128, 8), (256, 8)):
        if (rows_n, warps) != (base.rows_n, base.warps):
            yield configs.cut(replace(base, rows_n=rows_n, warps=warps), form, shape, rows, 1, device)
    if form is not GpuForm.FP8_BLOCK and -(-shape[1] // TILE_COLS) % 2 == 0:
        yield configs.cut(replace(base, tiles=3 - base.tiles), form, shape, rows, 1, device)


def _weights(form: GpuForm, shape: tuple[int, int]) -> list[GpuWeight]:
    weight = quantize_tensor(torch.randn(shape, device="cuda") * 0.02, SCHEMES[SCHEME_NAMES[form]].weight)
    return [pack(weight) for _ in range(max(1, math.ceil(_ROTATED_BYTES / weight.nbytes)))]


def _seconds(config: Config, weights: Sequence[GpuWeight], rows: int) -> float:
    """Return the median time of one product in a CUDA graph; infinite if it cannot run."""
    from minifloat.kernels.linear.triton.product import multiply

    n, k = weights[0].shape
    x = torch.randn(rows, k, device="cuda").bfloat16()
    y = x.new_empty(rows, n)
    try:
        multiply(x, weights[0], None, y, config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for weight in weights:
                multiply(x, weight, None, y, config)
    except Exception:  # Triton raises many kinds: too little shared memory, too many registers
        torch.cuda.synchronize()
        return math.inf
    return statistics.median(replay(graph) for _ in range(_SAMPLES)) / len(weights)


@click.command(help=__doc__.split("\n")[0])
@click.option("--shape", "shapes", multiple=True, help="Of a weight, as 4096x14336; several.  [default: an 8B Llama]")
@click.option(
    "--form", "forms", multiple=True, type=click.Choice([form.name for form in GpuForm]), help="[default: all]"
)
@click.option("--rows", multiple=True, type=int, help="Of x; several.  [default: all that a table has]")
@click.option("--out", type=click.Path(path_type=Path), help="The table.  [default: where it is read from]")
def main(shapes: tuple[str, ...], forms: tuple[str, ...], rows: tuple[int, ...], out: Path | None) -> None:
    """Parse, measure, write."""
    try:
        table = tune(
            [_shape(text) for text in shapes] or SHAPES,
            [GpuForm[name] for name in forms] or tuple(GpuForm),
            rows or BUCKETS,
        )
        path = out or configs.table_path(torch.cuda.get_device_name())
        if path is None:
            raise UsageError(f"{configs.TABLE_VARIABLE} is empty, so no table is read; give --out")
        previous = configs.read_table(path) if path.is_file() else {}
        configs.write_table(path, {**previous, **table})
    except MinifloatError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo(f"{len(table)} configurations better than the arithmetic's, in {path}")


def _shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    if not (rows.isdigit() and cols.isdigit() and int(rows) and int(cols)):
        raise UsageError(f"expected a shape as 4096x14336, got {text!r}")
    return int(rows), int(cols)


if __name__ == "__main__":
    main()
