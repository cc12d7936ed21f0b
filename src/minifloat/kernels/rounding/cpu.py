"""Calibrated rounding by the native library (``csrc/rounding``)."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native.structs import STRUCTS, format_struct
from minifloat.numerics.formats import ElementFormat


def round_with_feedback(
    weight: Tensor, scales: Tensor, groups: Tensor, feedback: Tensor, element: ElementFormat
) -> Tensor:
    """Implement `minifloat.kernels.rounding.round_with_feedback`."""
    library = native.require()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    args = STRUCTS["round_with_feedback_args"](
        weight=weight.data_ptr(),
        scales=scales.data_ptr(),
        group_of=groups.data_ptr(),
        feedback=feedback.data_ptr(),
        codes=codes.data_ptr(),
        rows=weight.shape[0],
        cols=weight.shape[1],
        groups=scales.shape[1],
        element=format_struct(element),
        threads=threads.count(),
    )
    library.call("round_with_feedback", args)
    return codes


def gram(x: Tensor, y: Tensor, out: Tensor, same: bool) -> None:
    """Implement `minifloat.kernels.rounding.gram`; with `same` the memory of `y` is that of `x`."""
    args = STRUCTS["gram_args"](
        x=x.data_ptr(),
        y=y.data_ptr(),
        out=out.data_ptr(),
        rows=x.shape[0],
        x_cols=x.shape[1],
        y_cols=y.shape[1],
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        dtype=DTYPES[x.dtype],
        symmetric=same,
        threads=threads.count(),
    )
    native.require().call("gram", args)
