"""Packing by the native library (``csrc/linear/pack.cpp``)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.native.structs import STRUCTS
from minifloat.kernels.pack.layout import Form


def pack(
    codes: Tensor, scales: Tensor | None, factor: float, form: Form, packed: Tensor, thread_count: int | None
) -> None:
    """Fill `packed`, uint8 ``[plan(form).total]``."""
    native.require().call("pack", _args(codes, scales, factor, form, packed, thread_count))


def unpack(codes: Tensor, scales: Tensor | None, form: Form, packed: Tensor) -> None:
    """Fill `codes` and `scales`."""
    native.require().call("unpack", _args(codes, scales, 1.0, form, packed, None))


def _args(
    codes: Tensor, scales: Tensor | None, factor: float, form: Form, packed: Tensor, thread_count: int | None
) -> ctypes.Structure:
    rows, cols = form.shape
    block_rows, block_cols = form.block
    return STRUCTS["pack_args"](
        codes=codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        rows=rows,
        cols=cols,
        block_rows=block_rows,
        block_cols=block_cols,
        element=form.element,
        grid=form.grid,
        factor=factor,
        threads=threads.count() if thread_count is None else thread_count,
        packed=packed.data_ptr(),
    )
