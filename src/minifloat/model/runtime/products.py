"""Products of matrices in 16 bits on CPUs for which torch has no code for them, or code that is slower than float32's.

Without AVX-512 torch multiplies BF16 one dot product at a time, in a backward pass on one thread: 12 and 0.3 GFLOP/s on
two cores of a Zen 3 where float32 has 90 (4096x4096, 256 rows, torch 2.13). In float16 it does so without AVX512_FP16.
With AVX-512 alone BF16 has 60 GFLOP/s on two cores of an Emerald Rapids, with AVX512_BF16 160, where this module has
215 (8192x5120, 256 rows).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from minifloat.kernels import native

_ATEN = torch.ops.aten
#: Weights that are float32 at a time.
_MOST_ELEMENTS = 1 << 24
#: Rows for which it pays to cast a weight, where torch has code that is slower.
_ROWS_TO_CAST = 128
#: Instruction sets with products in BF16 that are faster than those in float32.
_WITH_BF16 = frozenset({"amx", "avx512_bf16"})


def fast_products() -> AbstractContextManager[object]:
    """Return a context in which products and their gradients are computed in float32 where torch is slow in 16 bits.

    Results are rounded to the dtype of the inputs, as always.
    """
    slow = _slow_dtypes()
    return _Float32Products(slow) if slow else nullcontext()


@functools.cache
def _slow_dtypes() -> dict[torch.dtype, int]:
    """Return the dtypes of 16 bits that this machine's torch is slow in, and from how many rows on; 0: always."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return {torch.bfloat16: 0, torch.float16: 0}
    found = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    slow = {dtype: 0 for dtype, supported in found.items() if not supported()}
    library = native.load()
    if library is not None and library.isas[0].startswith("avx512") and not _WITH_BF16.intersection(library.isas):
        slow.setdefault(torch.bfloat16, _ROWS_TO_CAST)
    return slow


class _Buffer(threading.local):
    """Memory of each thread for a part of a weight in float32: new pages take as long as the cast."""

    values: Tensor | None = None

    def cast(self, part: Tensor) -> Tensor:
        """Return a matrix in float32, until the next call."""
        if self.values is None or self.values.numel() < part.numel():
            with torch.inference_mode(False):
                self.values = torch.empty(max(part.numel(), _MOST_ELEMENTS))
        transposed = not part.is_contiguous() and part.T.is_contiguous()
        stored = part.T if transposed else part
        cast = self.values[: part.numel()].view(stored.shape).copy_(stored)
        return cast.T if transposed else cast


_BUFFER = _Buffer()


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _addmm(torch.zeros(1), a, b)


def _addmm(added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return ``beta added + alpha a @ b``, for which `b` becomes float32 a part at a time."""
    wide, columns = a.float(), max(1, _MOST_ELEMENTS // max(len(b), 1))
    added = added.expand(*added.shape[:-1], b.shape[1])
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    for start in range(0, b.shape[1], columns):
        part = slice(start, start + columns)
        out[:, part] = torch.addmm(added[..., part].float(), wide, _BUFFER.cast(b[:, part]), beta=beta, alpha=alpha)
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
    def __init__(self, rows: Mapping[torch.dtype, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        product = _MATRICES.get(function)
        if product is None and function not in _OTHERS:
            return function(*args, **named)
        dtype, rows = args[0].dtype, self._rows.get(args[0].dtype)
        if rows is None or args[0].device.type != "cpu":
            return function(*args, **named)
        if product is not None:
            return (product if _rows_of(function, args) >= rows else function)(*args, **named)
        if rows:
            return function(*args, **named)
        wide = tree_map_only(Tensor, lambda x: x.float() if x.dtype == dtype else x, (args, named))
        result = function(*wide[0], **wide[1])
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.dtype == torch.float32 else x, result)


def _rows_of(function: Any, args: tuple[Any, ...]) -> int:
    x = args[1] if function is _ATEN.addmm.default else args[0]
    return int(x.numel() // x.shape[-1])
