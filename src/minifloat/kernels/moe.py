"""`moe_linear` multiplies the tokens of all experts of a layer in one call, tokens grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native, ops
from minifloat.kernels.dtypes import has_kernel, unsupported
from minifloat.kernels.linear import cpu, int8, reference
from minifloat.kernels.pack import PackedExperts, PackedWeight

__all__ = ["PackedExperts", "moe_linear", "sort_by_expert"]


def moe_linear(
    x: Tensor,
    experts: Sequence[PackedWeight],
    offsets: Tensor,
    x_rows: Tensor | None = None,
    biases: Tensor | None = None,
    *,
    impl: str = "auto",
    int8_inputs: bool = False,
) -> Tensor:
    """Compute ``x[x_rows[t]] @ experts[e].T + biases[e]`` for every row t and the expert e that owns the row."""
    if not isinstance(experts, PackedExperts):
        experts = PackedExperts(experts)
    _check(x, experts, biases)
    eager = ops.is_eager(x, (biases,))
    if eager:  # while torch traces there are no values; the op checks them when it runs
        ops.check_groups(offsets, x_rows, len(experts), x.shape[0])
    if not native.runs("moe_linear", impl):
        return _multiply_in_torch(x, experts, offsets, x_rows, biases, int8_inputs)
    if eager:
        return cpu.run_experts(x, experts.pointers, offsets, x_rows, biases, int8_inputs)
    data = [weight.data for weight in experts]
    y: Tensor = torch.ops.minifloat.moe_linear(x, data, offsets, x_rows, biases, experts.shape[0], int8_inputs)
    return y


def sort_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group the tokens of a batch by the experts that they were routed to."""
    if expert_ids.ndim != 2:
        raise ShapeError("expert_ids", f"expected [T, k], got {list(expert_ids.shape)}")
    if expert_ids.dtype != torch.int64:
        raise UnsupportedTensorError("expert_ids", f"expected int64, got {expert_ids.dtype}")
    flat = expert_ids.flatten()
    low, high = (int(bound) for bound in flat.aminmax()) if flat.numel() else (0, 0)
    if low < 0 or high >= experts:
        raise ShapeError("expert_ids", f"expected experts 0 to {experts - 1}, got {low} to {high}")
    order = flat.argsort(stable=True)
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(flat.bincount(minlength=experts), 0, out=offsets[1:])
    return offsets, order // max(expert_ids.shape[1], 1), order


def _check(x: Tensor, experts: PackedExperts, biases: Tensor | None) -> None:
    rows, cols = experts.shape
    if x.ndim != 2 or x.shape[1] != cols:
        raise ShapeError("x", f"expected [M, {cols}] for experts of {rows}x{cols}, got {list(x.shape)}")
    if not has_kernel(x):
        raise unsupported("x", x)
    if biases is None:
        return
    if biases.shape != (len(experts), rows) or biases.stride(1) != 1:
        raise ShapeError("biases", f"expected [{len(experts)}, {rows}] with contiguous rows, got {list(biases.shape)}")
    if not has_kernel(biases):
        raise unsupported("biases", biases)


def _multiply_in_torch(
    x: Tensor,
    experts: Sequence[PackedWeight],
    offsets: Tensor,
    x_rows: Tensor | None,
    biases: Tensor | None,
    int8_inputs: bool = False,
) -> Tensor:
    """The reference of the native library: one linear per expert that has tokens."""
    bounds = offsets.tolist()
    linear = int8.linear if int8_inputs else reference.linear
    parts = [x.new_empty(0, experts[0].shape[0])]
    for expert, weight in enumerate(experts):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start < rows.stop:
            tokens = x[rows] if x_rows is None else x[x_rows[rows]]
            parts.append(linear(tokens, weight.unpack(), None if biases is None else biases[expert]))
    return torch.cat(parts)
