"""Quantizes a slab of rows into codes, scales and error statistics, for the streaming quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError, UsageError
from minifloat.kernels import triton_runtime
from minifloat.kernels.quantize import cpu
from minifloat.kernels.quantize.cpu import Slab
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import BFLOAT16, FLOAT16, FLOAT32, ElementFormat
from minifloat.numerics.scheme import WeightSpec

#: Source dtypes by their names in safetensors.
SOURCE_FORMATS: dict[str, ElementFormat] = {"BF16": BFLOAT16, "F16": FLOAT16, "F32": FLOAT32}

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")

_BYTE_BITS = 8

Outputs = tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.float32] | npt.NDArray[np.uint8] | None]


@dataclass(frozen=True)
class QuantizedRows:
    """A quantized slab ``[R, K]``."""

    codes: npt.NDArray[np.uint8]  #: ``[R, K]``, or ``[R, K / 2]`` of two elements each, the even column low
    scales: npt.NDArray[np.float32] | npt.NDArray[np.uint8]  #: the grid of ``spec.granularity``
    stats: CastStats  #: error statistics, summed over the slab; those of several slabs add up
    nonfinite: int  #: number of NaN and Inf in the slab. If it is not 0, everything else is unspecified


def amax(
    data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, int], *, impl: str = "auto", device: str = "cuda"
) -> tuple[float, int]:
    """Return the amax of a slab and the number of NaN and Inf in it."""
    _check_source(data, dtype, shape)
    implementation = _choose(impl, None, device)
    if data.size == 0:
        return 0.0, 0
    if implementation == "cpu":
        return cpu.amax(data, dtype)
    if implementation == "triton":
        from minifloat.kernels.quantize import triton  # imports torch and triton

        return triton.amax(data, dtype, device)
    from minifloat.kernels.quantize import reference  # imports torch

    return reference.amax(data, dtype)


def quantize_rows(
    data: npt.NDArray[np.uint8],
    dtype: str,
    shape: tuple[int, int],
    spec: WeightSpec,
    *,
    tensor_amax: float | None = None,
    impl: str = "auto",
    device: str = "cuda",
    out: Outputs = (None, None),
) -> QuantizedRows:
    _check_source(data, dtype, shape)
    packed = spec.element.bits * 2 == _BYTE_BITS
    rows, cols = shape
    if packed and cols % 2:
        raise ShapeError("weight", f"two {spec.element.name} elements share a byte: expected an even K, got {shape}")
    checked_amax = _checked_amax(spec, tensor_amax)
    codes = _output("codes of out", out[0], (rows, cols // 2 if packed else cols), np.dtype(np.uint8))
    scale_dtype = np.dtype(np.float32 if spec.scale is FLOAT32 else np.uint8)
    scales = _output("scales of out", out[1], spec.granularity.scale_shape(shape), scale_dtype)
    implementation = _choose(impl, spec, device)
    if data.size == 0:
        return QuantizedRows(codes, scales, CastStats(), 0)
    slab = Slab(data, dtype, shape, spec, checked_amax, codes, scales)
    if implementation == "cpu":
        stats, nonfinite = cpu.quantize_rows(slab)
    elif implementation == "triton":
        from minifloat.kernels.quantize import triton  # imports torch and triton

        stats, nonfinite = triton.quantize_rows(slab, device)
    else:
        from minifloat.kernels.quantize import reference  # imports torch

        stats, nonfinite = reference.quantize_rows(slab)
    return QuantizedRows(codes, scales, stats, nonfinite)


def why_not(impl: str, spec: WeightSpec | None = None, device: str = "cuda") -> str:
    """Return why an implementation cannot run here or does not cover `spec`; empty if it can."""
    if impl == "cpu":
        return cpu.why_not(spec)
    if impl != "triton":
        return ""
    reason = triton_runtime.why_unavailable(device)
    if reason or spec is None:
        return reason
    from minifloat.kernels.quantize import triton  # imports torch and triton

    return triton.why_not_spec(spec)


def _choose(impl: str, spec: WeightSpec | None, device: str) -> str:
    """Return the implementation that runs; the only place that resolves ``auto``."""
    if impl not in IMPLEMENTATIONS:
        raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
    if impl == "auto":
        return "reference" if cpu.why_not(spec) else "cpu"
    reason = why_not(impl, spec, device)
    if reason:
        raise KernelUnavailable(f"quantize_rows(impl={impl!r}) cannot run: {reason}")
    return impl


def _check_source(data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, int]) -> None:
    if dtype not in SOURCE_FORMATS:
        raise UnsupportedTensorError("weight", f"dtype {dtype}; expected one of {', '.join(SOURCE_FORMATS)}")
    if len(shape) != 2 or min(shape) < 0:
        raise ShapeError("weight", f"expected a matrix (R, K), got the shape {shape}")
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise ValueError(f"data must be contiguous uint8, got {data.dtype} with strides {data.strides}")
    expected = shape[0] * shape[1] * SOURCE_FORMATS[dtype].bits // _BYTE_BITS
    if data.nbytes != expected:
        raise ShapeError("weight", f"{shape} of {dtype} are {expected} bytes, got {data.nbytes}")


def _checked_amax(spec: WeightSpec, tensor_amax: float | None) -> float | None:
    if not spec.needs_tensor_amax:
        return None
    if tensor_amax is None:
        raise UsageError(
            f"{spec.granularity} scales in {spec.scale.name} need tensor_amax, the amax of the whole tensor"
        )
    if not (isfinite(tensor_amax) and tensor_amax >= 0.0):
        raise UsageError(f"tensor_amax must be finite and not negative, got {tensor_amax}")
    return tensor_amax


def _output(name: str, out: npt.NDArray[Any] | None, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"{name} must be a writable, contiguous {dtype} {shape}, got {out.dtype} {out.shape}")
    return out
