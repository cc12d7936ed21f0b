"""Calibrated rounding on the CPU: the passes over a weight and over activations that take nearly all of its time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.native import CONSTANTS, STRUCTS, format_struct
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import ElementFormat

#: Rows of a weight that exchange their errors.
ROW_BLOCK: int = CONSTANTS["ROW_BLOCK"]


def round_with_feedback(
    weight: Tensor,
    scales: Tensor,
    groups: Tensor,
    feedback: Tensor,
    element: ElementFormat,
    row_feedback: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Round the columns of a weight in ascending order, feeding the error of each into the columns behind it.

    With `row_feedback`, float32 ``[N, ROW_BLOCK]``, zero up to the diagonal of each block of rows, the error of a row
    is fed into the rows behind it in its block, within each column.
    """
    if not element.signed or element.bits > torch.uint8.itemsize * 8:
        raise ValueError(f"round_with_feedback needs a signed format of at most 8 bits, got {element.name}")
    floats = {"weight": weight, "scales": scales, "feedback": feedback}
    if row_feedback is not None:
        floats["row_feedback"] = row_feedback
        if row_feedback.shape != (len(weight), ROW_BLOCK):
            expected = [len(weight), ROW_BLOCK]
            raise ShapeError("row_feedback", f"expected {expected}, got {list(row_feedback.shape)}")
    for name, tensor in floats.items():
        _check_matrix(name, tensor, (torch.float32,))
        _check_contiguous(name, tensor)
    _check_dtype("groups", groups, (torch.int32,))
    _check_contiguous("groups", groups)
    _check_feedback_shapes(weight, scales, groups, feedback)
    if native.runs("round_with_feedback", impl):
        return _round_native(weight, scales, groups, feedback, element, row_feedback)
    return _round_in_torch(weight, scales, groups, feedback, element, row_feedback)


def gram(x: Tensor, y: Tensor, out: Tensor, *, impl: str = "auto") -> None:
    """Add ``x.T @ y`` to `out`: the Gram matrix of `x` if `y` is `x`, of which half is computed and mirrored."""
    for name, tensor, dtypes in (("x", x, tuple(DTYPES)), ("y", y, (x.dtype,)), ("out", out, (torch.float32,))):
        _check_matrix(name, tensor, dtypes)
    _check_contiguous("out", out)
    if y.shape[0] != x.shape[0]:
        raise ShapeError("y", f"expected [{x.shape[0]}, K2] for x {list(x.shape)}, got {list(y.shape)}")
    if out.shape != (x.shape[1], y.shape[1]):
        raise ShapeError("out", f"expected [{x.shape[1]}, {y.shape[1]}], got {list(out.shape)}")
    same = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
    if native.runs("gram", impl):
        _gram_native(x, y, out, same)
    else:
        _gram_in_torch(x, y, out, same)


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes or tensor.device.type != "cpu":
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedTensorError(name, f"expected {expected} on the CPU, got {tensor.dtype} on {tensor.device}")


def _check_matrix(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
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


def _round_native(
    weight: Tensor,
    scales: Tensor,
    groups: Tensor,
    feedback: Tensor,
    element: ElementFormat,
    row_feedback: Tensor | None,
) -> Tensor:
    library = native.require()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    args = STRUCTS["round_with_feedback_args"](
        weight=weight.data_ptr(),
        scales=scales.data_ptr(),
        group_of=groups.data_ptr(),
        feedback=feedback.data_ptr(),
        row_feedback=None if row_feedback is None else row_feedback.data_ptr(),
        codes=codes.data_ptr(),
        rows=weight.shape[0],
        cols=weight.shape[1],
        groups=scales.shape[1],
        element=format_struct(element),
        threads=threads.count(),
    )
    library.call("round_with_feedback", args)
    return codes


def _gram_native(x: Tensor, y: Tensor, out: Tensor, same: bool) -> None:
    """With `same` the memory of `y` is that of `x`."""
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


def _round_in_torch(
    weight: Tensor,
    scales: Tensor,
    groups: Tensor,
    feedback: Tensor,
    element: ElementFormat,
    row_feedback: Tensor | None,
) -> Tensor:
    """The reference of the native library."""
    work = weight.clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for j, group in enumerate(groups.tolist()):
        scale = scales[:, group]
        codes[:, j] = _round_column(work[:, j], scale, element, row_feedback)
        error = weight[:, j] - decode(codes[:, j], element) * scale
        # The product is a tensor of its own: torch.addr and the like may fuse it with the addition.
        work[:, j + 1 :] += error[:, None] * feedback[j, j + 1 :]
    return codes


def _round_column(work: Tensor, scale: Tensor, element: ElementFormat, row_feedback: Tensor | None) -> Tensor:
    if row_feedback is None:
        return encode(work / scale, element)
    missing = -len(work) % ROW_BLOCK
    work = pad(work, (0, missing)).view(-1, ROW_BLOCK)
    scale = pad(scale, (0, missing), value=1.0).view(-1, ROW_BLOCK)
    feedback = pad(row_feedback, (0, 0, 0, missing)).view(-1, ROW_BLOCK, ROW_BLOCK)
    added, codes = torch.zeros_like(work), torch.empty(work.shape, dtype=torch.uint8)
    for i in range(ROW_BLOCK):
        codes[:, i] = encode((work[:, i] + added[:, i]) / scale[:, i], element)
        taken = work[:, i] - decode(codes[:, i], element) * scale[:, i]
        added += taken[:, None] * feedback[:, i]
    return codes.flatten()[: codes.numel() - missing]


def _gram_in_torch(x: Tensor, y: Tensor, out: Tensor, same: bool) -> None:
    """The reference of the native library."""
    product = x.float().T @ y.float()
    out += product.triu() + product.triu(1).T if same else product
