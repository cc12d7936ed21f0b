"""`quantize_rows` and `amax` by Triton on a CUDA device, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.kernels.quantize.cpu import Slab
from minifloat.kernels.quantize.triton import blocks, scales
from minifloat.kernels.triton_cast import OPTIONS, constants, rounds_e4m3
from minifloat.numerics.cast import encode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_rules import NVFP4_SEARCH_OFFSETS
from minifloat.numerics.scheme import ScaleRule, WeightSpec

#: The dtypes that the kernels read: bfloat16 as int16 with the same bits.
_DTYPES = {"BF16": torch.int16, "F16": torch.float16, "F32": torch.float32}

_SCALINGS = {
    (FLOAT32, ScaleRule.AMAX): scales.FLOAT_SCALES,
    (FLOAT32, ScaleRule.RCEIL): scales.FLOAT_RCEIL,
    (E4M3, ScaleRule.AMAX): scales.CODED_SCALES,
    (E8M0, ScaleRule.FLOOR): scales.FLOOR,
    (E8M0, ScaleRule.EVEN): scales.EVEN,
    (E8M0, ScaleRule.RCEIL): scales.RCEIL,
    (E8M0, ScaleRule.SEARCH): scales.SEARCH,
    (E4M3, ScaleRule.SEARCH): scales.CODED_SEARCH,
}

#: Elements that a thread holds at a time, and a program. A search keeps a block in each thread.
_PER_THREAD = 16
_TILE = 4096
#: Tiles that a program casts one after the other if there are many, so that it adds up statistics less often.
_TILES = 4
_MANY_TILES = 4096
#: Threads that load 16 bytes at once read memory at its full speed.
_VECTOR_BYTES = 16
_AMAX_CHUNK = 16384
_AMAX_WARPS = 8

_streams = threading.local()
#: Held while a thread launches a kernel, so that each kernel is compiled once.
_launching = threading.Lock()


def why_not_spec(spec: WeightSpec) -> str:
    """Return why the kernels do not cover `spec`; empty if they do."""
    rows, cols = spec.granularity.rows, spec.granularity.cols
    if (spec.scale, spec.rule) not in _SCALINGS:
        return f"no {spec.scale.name} scales by the rule {spec.rule.value}"
    if cols is not None and (cols & (cols - 1) or cols == 1 or cols > _TILE):
        return f"blocks must be a power of two wide, 2 to {_TILE}, not {spec.granularity}"
    if cols is not None and (rows is None or rows & (rows - 1)):
        return f"blocks must be a power of two high, not {spec.granularity}"
    if cols is None and rows not in (1, None):
        return f"blocks of whole rows must be one row high, not {spec.granularity}"
    if spec.rule is ScaleRule.SEARCH and (rows != 1 or cols is None):
        return f"the search needs groups of columns, not {spec.granularity}"
    return ""


def host_buffer(nbytes: int, device: str) -> npt.NDArray[np.uint8]:
    """Allocate host memory, uint8 ``[nbytes]``, pinned if `device` is a CUDA device."""
    pinned = torch.device(device).type == "cuda"
    buffer: npt.NDArray[np.uint8] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned).numpy()
    return buffer


def amax(data: npt.NDArray[np.uint8], dtype: str, device: str) -> tuple[float, int]:
    """Return the amax of the finite elements of `data`, which is not empty, and the number of NaN and Inf."""
    with _stream(device):
        w = _on(device, data).view(_DTYPES[dtype])
        programs = -(-w.numel() // _AMAX_CHUNK)
        results = torch.empty(2, programs, dtype=torch.int32, device=device)
        with _launching:
            blocks.amax_of_chunks[(programs,)](
                w,
                results[0],
                results[1],
                w.numel(),
                BF16=dtype == "BF16",
                CHUNK=_AMAX_CHUNK,
                num_warps=_AMAX_WARPS,
                **OPTIONS,
            )
        largest, nonfinite = torch.stack((results[0].max().long(), results[1].sum())).tolist()
    return float(np.int32(largest).view(np.float32)), int(nonfinite)


def quantize_rows(slab: Slab, device: str) -> tuple[CastStats, int]:
    """Quantize a slab; return the statistics and the number of NaN and Inf."""
    scale_dtype = torch.float32 if slab.spec.scale is FLOAT32 else torch.uint8
    with _stream(device):
        w = _on(device, slab.data).view(_DTYPES[slab.dtype]).view(slab.shape)
        codes = torch.empty(slab.codes.shape, dtype=torch.uint8, device=device)
        scales = torch.empty(slab.scales.shape, dtype=scale_dtype, device=device)
        statistics = launch(w, slab.spec, slab.tensor_amax, codes, scales)
        torch.from_numpy(slab.codes).copy_(codes, non_blocking=True)
        torch.from_numpy(slab.scales).copy_(scales)
        signal, noise, saturated, flushed, nonfinite = statistics.tolist()
    return CastStats(w.numel(), signal, noise, int(saturated), int(flushed)), int(nonfinite)


def launch(w: Tensor, spec: WeightSpec, tensor_amax: float | None, codes: Tensor, scales: Tensor) -> Tensor:
    """Launch the kernel on tensors of the device, without waiting for the result."""
    rows, cols = w.shape
    block_cols = spec.granularity.cols
    grid_cols = -(-cols // block_cols) if block_cols else 1
    count = scales.numel() if block_cols else rows
    arguments = kernel_arguments(spec, w.dtype, cols, rounds_e4m3=rounds_e4m3(w.device))
    tiles = -(-count // arguments["BLOCKS"])
    at_once = _TILES if tiles >= _MANY_TILES else 1
    programs = -(-tiles // at_once)
    statistics = torch.empty(programs, len(blocks.STATISTICS), dtype=torch.float64, device=w.device)
    amax, divisor = tensor_amax or 0.0, _divisor(spec, tensor_amax)
    pointers = (w, codes, scales, statistics)
    with _launching:
        blocks.quantize_blocks[(programs,)](
            *pointers, rows, cols, grid_cols, count, at_once, amax, divisor, **arguments, **options(arguments)
        )
    return statistics.sum(0)


def options(arguments: dict[str, Any]) -> dict[str, Any]:
    block = arguments["PARTS"] * arguments["VECTOR"]
    searches = arguments["PART_AXIS"] == 0
    per_thread = block if searches else _PER_THREAD
    warps = min(max(arguments["BLOCKS"] * block // (32 * per_thread), 1), 16)
    return {"num_warps": warps, **OPTIONS}


def kernel_arguments(spec: WeightSpec, dtype: torch.dtype, cols: int, *, rounds_e4m3: bool = False) -> dict[str, Any]:
    """Return the constants that `blocks.quantize_blocks` is compiled with."""
    element = spec.element
    coded = spec.scale if spec.has_global_scale else E4M3
    block_cols = spec.granularity.cols or 0
    block_rows = (spec.granularity.rows or 1) if block_cols else 1
    size = block_rows * (block_cols or _power_of_two(cols))
    searches = spec.rule is ScaleRule.SEARCH
    vector = min(_VECTOR_BYTES // dtype.itemsize, block_cols or _power_of_two(cols))
    chunk = min(size, _TILE)
    scaling = _SCALINGS[spec.scale, spec.rule]
    one_scale = spec.granularity == TENSOR
    return {
        "BF16": dtype == torch.int16,
        "PACKED": element.bits * 2 == torch.iinfo(torch.uint8).bits,
        "ONE_SCALE": one_scale,
        "SCALING": scaling,
        "SATURATES": scaling is not scales.RCEIL and (spec.scale is not FLOAT32 or one_scale),
        "POWERS": spec.scale is E8M0,
        "HARDWARE": rounds_e4m3 and element is E4M3,
        "ZERO_SCALE": int(encode(torch.tensor(2.0**-coded.mantissa_bits), coded)),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "BLOCKS": _TILE // chunk,
        "PARTS": chunk // vector,
        "VECTOR": vector,
        "PART_AXIS": 0 if searches else 1,
        "WHOLE": chunk == size,
        "RAGGED": bool(cols % (block_cols or chunk)),
        "LARGEST": element.max,
        "LIMIT": element.max + 2.0 ** (element.emax - element.mantissa_bits - 1),
        "EMAX": element.emax,
        "ELEMENT_MANTISSA": element.mantissa_bits,
        "ELEMENT_BIAS": element.bias,
        "ELEMENT_SIGN": element.bits - 1,
        **constants(coded, "SCALE"),
        "LAST_SCALE": coded.max_code,
        "SCALE_OFFSETS": NVFP4_SEARCH_OFFSETS,
    }


def _on(device: str, data: npt.NDArray[np.uint8]) -> Tensor:
    """Copy bytes to a device; read-only memory is copied first, because torch takes writable memory only."""
    return torch.from_numpy(data if data.flags.writeable else data.copy()).to(device, non_blocking=True)


def _divisor(spec: WeightSpec, tensor_amax: float | None) -> float:
    if not spec.has_global_scale or tensor_amax is None:
        return 1.0
    return float(scalar_global_divisor(tensor_amax))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 1).bit_length()


def _stream(device: str) -> AbstractContextManager[Any]:
    """Return a context with the stream of this thread on a device; on the CPU it does nothing."""
    target = torch.device(device)
    if target.type != "cuda":
        return nullcontext()
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("by_device", {})
    if target not in streams:
        streams[target] = torch.cuda.Stream(target)
    return torch.cuda.stream(streams[target])
