"""`quantize_rows` and `amax` by Triton on a CUDA device, or on the CPU in Triton's interpreter.

A call copies bytes to the device, runs one kernel and copies codes and scales back, all on a stream of the calling
thread, and then waits. Calls of several threads overlap: while one thread reads its file, the slab of another is copied
and that of a third is cast. Copies are fastest if the caller's arrays are in pinned memory (`host_buffer`). The caller,
`minifloat.kernels.quantize`, validates the arguments.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.kernels.quantize.slab import Slab
from minifloat.kernels.quantize.triton import blocks
from minifloat.kernels.triton_cast import OPTIONS, constants
from minifloat.numerics.cast import encode
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scale_search import NVFP4_SEARCH_OFFSETS
from minifloat.numerics.scheme import ScaleRule, WeightSpec

#: The dtypes that the kernels read: bfloat16 as int16 with the same bits.
_DTYPES = {"BF16": torch.int16, "F16": torch.float16, "F32": torch.float32}

_SCALINGS = {
    (FLOAT32, ScaleRule.AMAX): blocks.FLOAT_SCALES,
    (E4M3, ScaleRule.AMAX): blocks.CODED_SCALES,
    (E8M0, ScaleRule.FLOOR): blocks.FLOOR,
    (E8M0, ScaleRule.EVEN): blocks.EVEN,
    (E8M0, ScaleRule.RCEIL): blocks.RCEIL,
    (E8M0, ScaleRule.SEARCH): blocks.SEARCH,
    (E4M3, ScaleRule.SEARCH): blocks.CODED_SEARCH,
}

#: Elements that a program holds at a time.
_TILE = 4096
LAUNCH: dict[str, Any] = {"num_warps": 8, **OPTIONS}
_AMAX_CHUNK = 16384

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
                w, results[0], results[1], w.numel(), BF16=dtype == "BF16", CHUNK=_AMAX_CHUNK, **LAUNCH
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
        sums, counts = launch(w, slab.spec, slab.tensor_amax, codes, scales)
        torch.from_numpy(slab.codes).copy_(codes, non_blocking=True)
        torch.from_numpy(slab.scales).copy_(scales)
        signal, noise = sums.tolist()
        saturated, flushed, nonfinite = counts.tolist()
    return CastStats(w.numel(), signal, noise, saturated, flushed), nonfinite


def launch(
    w: Tensor, spec: WeightSpec, tensor_amax: float | None, codes: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on tensors of the device, without waiting for the result.

    Args:
        w: ``[N, K]``, contiguous: int16 (the bits of bfloat16), float16 or float32.
        spec: How to quantize; `why_not_spec` returns "" for it.
        tensor_amax: The amax of the whole tensor if ``spec.needs_tensor_amax``.
        codes: uint8, filled; two columns share a byte if elements have 4 bits.
        scales: The grid, float32 or uint8, filled.

    Returns:
        float64 ``[2]``: the sums of ``w**2`` and of the squared errors; and int64 ``[3]``: the numbers of saturated
        elements, of flushed elements, and of NaN and Inf.
    """
    rows, cols = w.shape
    block_cols = spec.granularity.cols
    grid_cols = -(-cols // block_cols) if block_cols else 1
    count = scales.numel() if block_cols else rows
    arguments = kernel_arguments(spec, w.dtype, cols)
    programs = -(-count // arguments["BLOCKS"])
    sums = torch.empty(programs, 2, dtype=torch.float64, device=w.device)
    counts = torch.empty(programs, 3, dtype=torch.int32, device=w.device)
    amax, divisor = tensor_amax or 0.0, _divisor(spec, tensor_amax)
    pointers = (w, codes, scales, sums, counts)
    with _launching:
        blocks.quantize_blocks[(programs,)](
            *pointers, rows, cols, grid_cols, count, amax, divisor, **arguments, **LAUNCH
        )
    return sums.sum(0), counts.sum(0)


def kernel_arguments(spec: WeightSpec, dtype: torch.dtype, cols: int) -> dict[str, Any]:
    """Return the constants that `blocks.quantize_blocks` is compiled with.

    Args:
        spec: Format, scales and granularity of the quantized weight.
        dtype: The dtype that the kernel reads.
        cols: Columns of the slab.
    """
    element = spec.element
    coded = spec.scale if spec.has_global_scale else E4M3
    block_cols = spec.granularity.cols or 0
    block_rows = (spec.granularity.rows or 1) if block_cols else 1
    chunk = min(block_rows * (block_cols or _power_of_two(cols)), _TILE)
    return {
        "BF16": dtype == torch.int16,
        "PACKED": element.bits * 2 == torch.iinfo(torch.uint8).bits,
        "ONE_SCALE": spec.granularity == TENSOR,
        "SCALING": _SCALINGS[spec.scale, spec.rule],
        "ZERO_SCALE": int(encode(torch.tensor(2.0**-coded.mantissa_bits), coded)),
        "BLOCK_ROWS": block_rows,
        "BLOCK_COLS": block_cols,
        "BLOCKS": _TILE // chunk,
        "CHUNK": chunk,
        "LEVELS": chunk.bit_length() - 1,
        "LARGEST": element.max,
        "LIMIT": element.max + 2.0 ** (element.emax - element.mantissa_bits - 1),
        "EMAX": element.emax,
        "ELEMENT_SIGN": element.bits - 1,
        **constants(element, "ELEMENT"),
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
