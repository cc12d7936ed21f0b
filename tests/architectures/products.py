"""Every product of an input and a weight in a model, seen from outside: what calibration must measure.

torch shows each call of a product to a `TorchFunctionMode`, whatever the modules look like: linears, experts one at a
time or in a batch, projections that read ``weight`` themselves. Weights are recognized by their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
_ADDED = (torch.addmm, torch.baddbmm)
_ROW = 16


def row_key(row: Tensor) -> bytes:
    """Return what identifies a row of a weight among random ones."""
    return bytes(row[:_ROW].detach().float().contiguous().numpy().tobytes())


def _products(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of an input ``[..., K]`` and a weight ``[N, K]`` that a call multiplies."""
    if func is linear and len(args) >= 2:
        yield args[0], args[1]
        return
    pair = args[1:3] if func in _ADDED else args[:2] if func in _PRODUCTS else ()
    if len(pair) != 2 or not all(isinstance(item, Tensor) for item in pair):
        return
    x, weight = pair
    if weight.ndim == 2:
        yield x, weight.T
        if x.ndim == 2:  # a weight may stand on the left: W @ x
            yield weight.T, x
    elif weight.ndim == 3 and x.ndim == 3:
        yield from ((x[index], weight[index].T) for index in range(len(weight)))


class InputRecorder(TorchFunctionMode):
    """Records the largest magnitude of the inputs of each row of each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.amax: dict[bytes, float] = {}
        self._keys: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[bytes]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and func is linear:
            args = (*args, *(kwargs[name] for name in ("input", "weight", "bias")[len(args) :] if name in kwargs))
            kwargs = {}
        with torch._C.DisableTorchFunction():
            for x, weight in _products(func, args):
                if weight.ndim == 2 and x.numel():
                    amax = float(x.detach().abs().amax())
                    for key in self._rows(weight):
                        self.amax[key] = max(self.amax.get(key, 0.0), amax)
        return func(*args, **(kwargs or {}))

    def _rows(self, weight: Tensor) -> list[bytes]:
        place = (weight.data_ptr(), tuple(weight.shape), weight.stride())
        if place not in self._keys or weight.data_ptr() == 0:
            self._keys[place] = [row_key(row) for row in weight]
        return self._keys[place]


class InputRounder(TorchFunctionMode):
    """Rounds the inputs of chosen weights, as a server with such inputs does."""

    def __init__(self, rounding: dict[bytes, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self._rounding = rounding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            if kwargs and func is linear:
                args = (*args, *(kwargs[name] for name in ("input", "weight", "bias")[len(args) :] if name in kwargs))
                kwargs = {}
            args = self._rounded(func, args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, func: Any, args: Any) -> Any:
        if func is linear or (func in _PRODUCTS and isinstance(args[1], Tensor) and args[1].ndim == 2):
            weight = args[1] if func is linear else args[1].T
            rule = self._rounding.get(row_key(weight[0])) if weight.ndim == 2 and len(weight) else None
            return args if rule is None else (rule(args[0]), *args[1:])
        if func in (torch.bmm, Tensor.bmm) and isinstance(args[1], Tensor):
            rules = [self._rounding.get(row_key(weight.T[0])) for weight in args[1]]
            if any(rules):
                x = torch.stack([x if rule is None else rule(x) for x, rule in zip(args[0], rules, strict=True)])
                return (x, *args[1:])
        return args


def round_static(scale: float) -> Callable[[Tensor], Tensor]:
    """Return what rounds inputs to E4M3 under one static scale."""
    return lambda x: (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale
