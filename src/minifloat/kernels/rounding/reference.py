"""Calibrated rounding in plain torch: the fallback without the native library, and its reference in tests."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import ElementFormat


def round_with_feedback(
    weight: Tensor, scales: Tensor, groups: Tensor, feedback: Tensor, element: ElementFormat
) -> Tensor:
    """Implement `minifloat.kernels.rounding.round_with_feedback`."""
    work = weight.clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    for j, group in enumerate(groups.tolist()):
        scale = scales[:, group]
        codes[:, j] = encode(work[:, j] / scale, element)
        error = weight[:, j] - decode(codes[:, j], element) * scale
        # The product is a tensor of its own: torch.addr and the like may fuse it with the addition.
        work[:, j + 1 :] += error[:, None] * feedback[j, j + 1 :]
    return codes


def gram(x: Tensor, y: Tensor, out: Tensor, same: bool) -> None:
    """Implement `minifloat.kernels.rounding.gram`; with `same` the memory of `y` is that of `x`."""
    product = x.float().T @ y.float()
    out += product.triu() + product.triu(1).T if same else product
