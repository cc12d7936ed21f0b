"""Measures in about two seconds how fast this machine does each kind of work of rounding with data."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from minifloat.calibration.options import BATCH_TOKENS
from minifloat.kernels import native, processors, threads
from minifloat.kernels.speed import read_bandwidth
from minifloat.model.runtime.products import fast_products
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.estimate import Rates
from minifloat.quantize.rounding.cholesky import for_each_tile
from minifloat.quantize.rounding.feedback import factorize, regress, times
from minifloat.quantize.rounding.methods import Grid, compensate, error_of
from minifloat.quantize.rounding.statistics import Accumulator, Rows

#: Rows, input channels and outputs of the products that are measured.
_TOKENS, _WIDTH, _OUTPUTS = 2048, 1536, 1024
#: Rows and columns of a tile of a factorization, and rows that a thread solves for.
_TILE = 512
#: Small operations between the products of a layer: norms, rotary embedding, softmax, residual sums, files.
_SMALL_OPERATIONS = 96
#: Channels that they work on.
_CHANNELS = 256
#: Seconds that Python takes for a layer.
_LEAST_PAUSE = 0.002
#: Seconds for which a kind of work is repeated.
_SECONDS = 0.2
#: Bytes that are read.
_BUFFER = 1 << 27


@torch.inference_mode()
def measure_rates(scheme: Scheme, dtype: torch.dtype, device: str | torch.device = "cpu") -> Rates:
    """Return the rates of this machine now, with what else runs on it; on a GPU, of its products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, _WIDTH, generator=generator).to(dtype)
    weight = torch.randn(_OUTPUTS, _WIDTH, generator=generator).to(dtype)
    moved, to_apply = x.to(device), weight.to(device)
    rows = Rows(moved, moved)

    def passes() -> None:
        for start in range(0, _TOKENS, BATCH_TOKENS):
            with fast_products():
                torch.nn.functional.linear(moved[start : start + BATCH_TOKENS], to_apply)
        _wait(moved)

    def sums() -> Tensor:
        accumulator = Accumulator(_WIDTH, device=moved.device)
        accumulator.add(rows)
        return accumulator.finish().hessian

    products = 2.0 * _TOKENS * _WIDTH * _OUTPUTS
    forward = _rate(products, passes)
    gram = _rate(float(_TOKENS) * _WIDTH**2, sums)
    feedback, single_weight = factorize(sums(), "rates"), weight.float()
    tile, transposed = single_weight[:_TILE], single_weight.T.contiguous()
    solve = _rate(2.0 * _TILE * _WIDTH**2, lambda: regress(tile, feedback))
    single = _rate(2.0 * _OUTPUTS**2 * _WIDTH, lambda: times(single_weight, transposed))
    grid = Grid.of(weight, scheme.weight, float(weight.abs().max()))
    rounding = _rate(_OUTPUTS * float(_WIDTH) ** 2, lambda: compensate(single_weight, [grid], feedback))

    def cast() -> None:
        nearest = [Grid.of(weight, scheme.weight, 1.0).nearest for _ in range(2)]
        error_of(weight, nearest[0])
        for each in (nearest[0], *nearest):
            each.dequantize()

    casts = _rate(float(_OUTPUTS) * _WIDTH, cast)
    return Rates(forward, gram, _tile_rate(), single, solve, rounding, casts, _read_rate(forward), _pause(moved))


def _pause(inputs: Tensor) -> float:
    """Return the seconds of the small operations of a layer, which wait for each other's threads."""
    hidden = inputs[:BATCH_TOKENS, :_CHANNELS]
    scores = hidden.float()

    def layer() -> None:
        for _ in range(_SMALL_OPERATIONS // 4):
            torch.softmax(scores + scores, -1).to(hidden.dtype).mul_(hidden)
        _wait(inputs)

    return max(1.0 / _rate(1.0, layer), _LEAST_PAUSE)


def _tile_rate() -> float:
    """Return operations per second of products of float64 tiles, one in each thread, as Cholesky takes them."""
    count = threads.count()
    tiles = [torch.ones(_TILE, _TILE, dtype=torch.float64) for _ in range(3 * count)]

    def multiply(item: slice) -> None:
        first = 3 * item.start
        tiles[first].addmm_(tiles[first + 1], tiles[first + 2].T, alpha=-1.0)

    with for_each_tile() as for_each:
        return _rate(2.0 * _TILE**3 * count, lambda: for_each(multiply, [slice(n, n) for n in range(count)]))


def _read_rate(forward: float) -> float:
    """Return the bytes that all threads read from memory in a second."""
    if native.load() is None:
        return forward / 2
    return read_bandwidth(_BUFFER, processors.limit(), 3).median


def _rate(operations: float, work: Callable[[], object]) -> float:
    """Return operations per second on average, with what else runs; a first call, not counted, starts threads."""
    work()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < _SECONDS or not count:
        work()
        count += 1
    return operations * count / elapsed


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
