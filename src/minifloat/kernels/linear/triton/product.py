"""Launches the GPU kernels of a product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat.kernels.linear.triton import config as configs
from minifloat.kernels.linear.triton import kernels
from minifloat.kernels.linear.triton.config import Config, Device
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm, Order, units_per_tile, words_per_tile
from minifloat.kernels.linear.triton.weight import GpuWeight
from minifloat.kernels.triton_overlap import launch_options, overlaps
from minifloat.kernels.triton_runtime import is_interpreted

#: Number of bfloat16 numbers whose sum is an element of x.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 4}
#: Bytes of a decoded weight that are in memory at the same time.
SCRATCH_BYTES = 128 << 20
#: Steps of a CTA whose weights are read ahead (`AHEAD` of the kernel); on an H100, 4 were slower than 1.
AHEAD = 1


def multiply(x: Tensor, weight: GpuWeight, bias: Tensor | None, y: Tensor, config: Config | None = None) -> None:
    """Fill `y` with ``x @ W.T + bias``."""
    rows = x.shape[0]
    if not rows:
        return
    parts = PARTS[x.dtype]
    config = config or configs.choose(weight.form, weight.shape, rows, parts, Device.of(x.device))
    if config.is_large:
        _multiply_large(x, weight, bias, y)
    else:
        _multiply_small(x, weight, bias, y, config, parts)


def _multiply_small(x: Tensor, weight: GpuWeight, bias: Tensor | None, y: Tensor, config: Config, parts: int) -> None:
    rows, cols = weight.shape
    grid = (-(-x.shape[0] // config.rows_m), -(-rows // config.rows_n), config.split)
    sums = counts = weight.row_scale  # never read
    overlap = overlaps(x.device)
    if config.split > 1:
        ctas = grid[0] * grid[1] * grid[2]
        sums = x.new_empty(ctas * config.rows_m * config.rows_n, dtype=torch.float32)
        counts = configs.take(x.device, grid[0] * grid[1])
    kernels.product_kernel[grid](
        x,
        weight.codes,
        *_scales(weight),
        weight.row_scale if bias is None else bias,
        y,
        sums,
        counts,
        x.shape[0],
        rows,
        cols,
        x.stride(0),
        y.stride(0),
        weight.tiles,
        *_blocks(weight),
        BM=config.rows_m,
        BN=config.rows_n,
        T=config.tiles,
        SPLIT=config.split,
        PARTS=parts,
        RAGGED=cols % (config.tiles * TILE_COLS) != 0,
        BIAS=bias is not None,
        INTERP=is_interpreted(),
        AHEAD=AHEAD if overlap else 0,
        **_constants(weight),
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(overlap),
    )


def _multiply_large(x: Tensor, weight: GpuWeight, bias: Tensor | None, y: Tensor) -> None:
    """Decode slabs of rows of the weight to the dtype of `x` and multiply them with cuBLAS."""
    rows, cols = weight.shape
    step = max(SCRATCH_BYTES // (cols * x.element_size()) // TILE_COLS * TILE_COLS, TILE_COLS)
    scratch = x.new_empty((min(step, rows), cols))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        part = scratch[: end - begin]
        dequantize(weight, part, begin)
        if bias is None:
            torch.mm(x, part.T, out=y[:, begin:end])
        else:
            torch.addmm(bias[begin:end].to(x.dtype), x, part.T, out=y[:, begin:end])


def dequantize(weight: GpuWeight, out: Tensor, first_row: int = 0) -> None:
    """Fill `out`, contiguous ``[n, K]``, with the rows of a weight from `first_row`, a multiple of 64."""
    halves = -(-out.shape[0] // 64)
    kernels.dequantize_kernel[(weight.tiles, halves)](
        weight.codes,
        *_scales(weight),
        out,
        first_row,
        first_row + out.shape[0],
        weight.shape[1],
        weight.tiles,
        *_blocks(weight),
        **_constants(weight),
        num_warps=4,
    )


def constants(form: GpuForm, order: Order, block_tiles: int = 1) -> dict[str, Any]:
    """Return the constants of a weight that the kernels are compiled with."""
    return {
        "FORM": int(form),
        "WIDE": int(order),
        "UNITS": units_per_tile(form),
        "WORDS": words_per_tile(form),
        "BLOCK_TILES": block_tiles,
    }


def _scales(weight: GpuWeight) -> tuple[Tensor, Tensor, Tensor]:
    factors = weight.row_scale if weight.factors is None else weight.factors
    blocks = weight.row_scale if weight.block_scale is None else weight.block_scale
    return factors, blocks, weight.row_scale


def _blocks(weight: GpuWeight) -> tuple[int, int]:
    return (0, 1) if weight.block_scale is None else (weight.block_scale.stride(0), weight.block[0])


def _constants(weight: GpuWeight) -> dict[str, Any]:
    block_tiles = 1 if weight.block_scale is None else -(-weight.block[1] // TILE_COLS)
    return constants(weight.form, weight.order, block_tiles)
