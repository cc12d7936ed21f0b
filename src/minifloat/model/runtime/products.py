"""Products of matrices in 16 bits on CPUs for which torch has no code for them.

Without AVX-512 torch multiplies BF16 one dot product at a time, in a backward pass on one thread: 12 and 0.3 GFLOP/s on
two cores of a Zen 3 where float32 has 90 (4096x4096, 256 rows, torch 2.13). In float16 it does so without AVX512_FP16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_ATEN = torch.ops.aten
#: Weights that are float32 at a time.
_MOST_ELEMENTS = 1 << 24


def fast_products() -> AbstractContextManager[object]:
    """Return a context in which products and their gradients are computed in float32 where torch is slow in 16 bits.

    Results are rounded to the dtype of the inputs, as always.
    """
    slow = _slow_dtypes()
    return _Float32Products(slow) if slow else nullcontext()


@functools.cache
def _slow_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes of 16 bits in which this machine's torch multiplies without oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset({torch.bfloat16, torch.float16})
    found = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, supported in found.items() if not supported())


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _addmm(torch.zeros(1), a, b)


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta added + alpha a @ b``, for which `b` becomes float32 a part at a time."""
    wide, columns = a.float(), max(1, _MOST_ELEMENTS // max(len(b), 1))
    added = added.expand(*added.shape[:-1], b.shape[1])
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    for start in range(0, b.shape[1], columns):
        part = slice(start, start + columns)
        out[:, part] = torch.addmm(added[..., part].float(), wide, b[:, part].float(), beta=beta, alpha=alpha)
    return out


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    added = torch.zeros(1) if bias is None else bias
    return _addmm(added, x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], len(weight))


_MATRICES: dict[Any, Callable[..., Tensor]] = {
    _ATEN.mm.default: _product,
    _ATEN.addmm.default: _addmm,
    _ATEN.linear.default: _linear,
}
#: Others, whose inputs become float32 as they are.
_OTHERS = frozenset(
    {
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN.matmul.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


class _Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtypes = dtypes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in _MATRICES and function not in _OTHERS:
            return function(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if dtype not in self._dtypes or args[0].device.type != "cpu":
            return function(*args, **(kwargs or {}))
        if function in _MATRICES:
            return _MATRICES[function](*args, **(kwargs or {}))
        wide = tree_map_only(Tensor, lambda x: x.float() if x.dtype == dtype else x, (args, dict(kwargs or {})))
        result = function(*wide[0], **wide[1])
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, result)
