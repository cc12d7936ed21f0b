"""Calibrated rounding on the CPU: the passes over a weight and over activations that take nearly all of its time.

`round_with_feedback` chooses the codes of a weight, GPTQ's inner loop. Plain torch takes one pass over the rest of the
weight for each column; the native library reads feedback from the cache once for many rows. `gram` sums the products of
activations that Hessians and targets are made of. Not included: how scales, the order of columns and the feedback are
chosen, and tensors on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.native import IMPLEMENTATIONS
from minifloat.kernels.rounding import cpu, reference
from minifloat.numerics.formats import ElementFormat

__all__ = ["GRAM_DTYPES", "IMPLEMENTATIONS", "gram", "round_with_feedback"]

GRAM_DTYPES = (torch.bfloat16, torch.float32)


def round_with_feedback(
    weight: Tensor, scales: Tensor, groups: Tensor, feedback: Tensor, element: ElementFormat, *, impl: str = "auto"
) -> Tensor:
    """Round the columns of a weight in ascending order, feeding the error of each into the columns behind it.

    With ``work`` a copy of `weight`, column j becomes the codes of ``work[:, j] / scale``, rounded to nearest, ties to
    even, and clamped; then ``work[:, k] += (weight[:, j] - decode(codes[:, j]) * scale) * feedback[j, k]`` for every
    column k > j. Every implementation gives the same codes, on every instruction set and with any number of threads:
    an element receives its updates in ascending order of j, each as one float32 multiplication and one float32
    addition. The native library follows IEEE 754 even if the caller lets torch flush subnormal numbers.

    Args:
        weight: float32 ``[N, K]``, finite, its columns in the order in which they are rounded.
        scales: float32 ``[N, G]``, positive and finite: what one code is worth.
        groups: int32 ``[K]``: the column of `scales` that holds the scales of each column of the weight.
        feedback: float32 ``[K, K]``, finite; only what is above the diagonal is read.
        element: A signed format of at most 8 bits.
        impl: ``"auto"`` (the native library if it is loaded, else the reference), ``"reference"`` or ``"cpu"``.

    Returns:
        uint8 codes ``[N, K]``, one per byte, columns in the order of `weight`.

    Source: Frantar et al., GPTQ, arXiv 2210.17323; Chee et al., QuIP, arXiv 2307.13304, which proves that GPTQ is this
        recurrence with the feedback of an LDL decomposition of the Hessian.
    """
    if not element.signed or element.bits > torch.uint8.itemsize * 8:
        raise ValueError(f"round_with_feedback needs a signed format of at most 8 bits, got {element.name}")
    floats = {"weight": weight, "scales": scales, "feedback": feedback}
    for name, tensor in floats.items():
        _check_matrix(name, tensor, (torch.float32,))
        _check_contiguous(name, tensor)
    _check_dtype("groups", groups, (torch.int32,))
    _check_contiguous("groups", groups)
    _check_feedback_shapes(weight, scales, groups, feedback)
    if native.runs("round_with_feedback", impl):
        return cpu.round_with_feedback(weight, scales, groups, feedback, element)
    return reference.round_with_feedback(weight, scales, groups, feedback, element)


def gram(x: Tensor, y: Tensor, out: Tensor, *, impl: str = "auto") -> None:
    """Add ``x.T @ y`` to `out`: the Gram matrix of `x` if `y` is `x`, of which half is computed and mirrored.

    Products of bfloat16 are exact; sums are float32, over at most some thousand rows before they are added to `out`.
    The bits depend on the implementation and the instruction set, not on the number of threads. With AMX, bfloat16
    inputs and sums below 2**-126 count as zero; every other path of the native library keeps subnormal numbers.

    Args:
        x: bfloat16 or float32 ``[T, K1]``; rows are contiguous and may lie apart.
        y: ``[T, K2]``, the dtype of `x`. If it is the memory of `x`, a symmetric `out` stays symmetric bit for bit.
        out: float32 ``[K1, K2]``, contiguous; added to. It must not overlap `x` or `y`.
        impl: ``"auto"`` (the native library if it is loaded, else the reference), ``"reference"`` or ``"cpu"``.
    """
    for name, tensor, dtypes in (("x", x, GRAM_DTYPES), ("y", y, (x.dtype,)), ("out", out, (torch.float32,))):
        _check_matrix(name, tensor, dtypes)
    _check_contiguous("out", out)
    if y.shape[0] != x.shape[0]:
        raise ShapeError("y", f"expected [{x.shape[0]}, K2] for x {list(x.shape)}, got {list(y.shape)}")
    if out.shape != (x.shape[1], y.shape[1]):
        raise ShapeError("out", f"expected [{x.shape[1]}, {y.shape[1]}], got {list(out.shape)}")
    same = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
    if native.runs("gram", impl):
        cpu.gram(x, y, out, same)
    else:
        reference.gram(x, y, out, same)


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.device.type != "cpu":
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedTensorError(name, f"expected {expected} on the CPU, got {tensor.dtype} on {tensor.device}")


def _check_matrix(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check a matrix whose rows are contiguous."""
    _check_dtype(name, tensor, dtypes)
    if tensor.ndim != 2:
        raise ShapeError(name, f"expected 2 dimensions, got {list(tensor.shape)}")
    if tensor.numel() and tensor.stride(1) != 1 and tensor.shape[1] != 1:
        raise UnsupportedTensorError(name, f"expected contiguous rows, got strides {list(tensor.stride())}")


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise UnsupportedTensorError(name, f"expected a contiguous tensor, got strides {list(tensor.stride())}")


def _check_feedback_shapes(weight: Tensor, scales: Tensor, groups: Tensor, feedback: Tensor) -> None:
    rows, cols = weight.shape
    if scales.shape[0] != rows:
        raise ShapeError("scales", f"expected [{rows}, G] for a weight {rows}x{cols}, got {list(scales.shape)}")
    if list(groups.shape) != [cols]:
        raise ShapeError("groups", f"expected [{cols}] for a weight {rows}x{cols}, got {list(groups.shape)}")
    if list(feedback.shape) != [cols, cols]:
        raise ShapeError(
            "feedback", f"expected [{cols}, {cols}] for a weight {rows}x{cols}, got {list(feedback.shape)}"
        )
    if cols:
        low, high = (int(bound) for bound in groups.aminmax())
        if low < 0 or high >= scales.shape[1]:
            raise ShapeError("groups", f"groups {low} to {high} of the {scales.shape[1]} columns of scales")
