"""The contenders of `benchmarks/linear.py`: our formats, torch, and other libraries for torch.

Every contender gets weights of its own, as many as have the requested bytes in total. They are copies of a weight that
is quantized from a normal distribution.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from linear_report import READ
from linear_shapes import BASELINE, FORMATS, Shape
from timing import Contender
from torch import Tensor
from torch.nn import functional

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.kernels import native
from minifloat.kernels.linear import int8, linear
from minifloat.kernels.native import STRUCTS
from minifloat.kernels.pack import PackedWeight, allocate, pack
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

FP32 = "torch FP32"
INT8 = "int8pack_mm"
TORCHAO = "torchao float8"
QUANTO = "quanto float8"
PEERS = (FP32, INT8, TORCHAO, QUANTO)
#: Peer -> the package that provides it.
PACKAGES = {TORCHAO: "torchao", QUANTO: "optimum.quanto"}

#: Bytes of one call of `memory_read`: enough that starting the threads takes a small part of its time.
READ_PART = 64 << 20
#: `_weight_int8pack_mm` of torch 2.13 reads outside its memory if N or K is not a multiple of this.
INT8_MULTIPLE = 32


def missing(peers: tuple[str, ...]) -> list[str]:
    """Return the peers whose package is not installed."""
    return [peer for peer in peers if peer in PACKAGES and not _installed(PACKAGES[peer])]


def contenders(shape: Shape, formats: tuple[str, ...], peers: tuple[str, ...], nbytes: int) -> list[Contender]:
    """Return the baseline, the peers that can run here and our formats, each with `nbytes` of distinct weights."""
    absent = missing(peers)
    if any(side % INT8_MULTIPLE for side in shape):
        absent.append(INT8)
    names = [BASELINE, *(peer for peer in peers if peer not in absent), *formats]
    _check_memory(len(names), shape, nbytes)
    made = [_make(name, shape, nbytes) for name in names]
    return [each for contender in made for each in (contender, *_with_int8_inputs(contender))]


def _with_int8_inputs(contender: Contender) -> list[Contender]:
    """Return the contender with inputs that may be rounded to int8, if its kernels do this; it shares the weights."""
    weight = contender.weights[0]
    if not isinstance(weight, PackedWeight) or int8.why_not(weight):
        return []
    return [
        Contender(
            f"{contender.name}, int8 inputs",
            lambda x, packed: linear(x, packed, int8_inputs=True),
            contender.weights,
            contender.nbytes,
        )
    ]


def memory_read(nbytes: int, threads: int) -> Contender:
    """Return a contender that reads `nbytes` in parts: the limit, measured in the same rounds as the others."""
    library = native.load()
    if library is None:
        raise KernelUnavailable(f"the read bandwidth cannot be measured: {native.why_unavailable()}")
    part = min(READ_PART, nbytes)
    data = allocate(_count(nbytes, part) * part).fill_(1)
    pieces = data.view(-1, part)
    parts = [(data, STRUCTS["read_args"](data=piece.data_ptr(), bytes=part, threads=threads)) for piece in pieces]
    return Contender(READ, lambda _, piece: library.call("read", piece[1]), parts, part)


def source(name: str, shape: Shape) -> QuantizedTensor | Tensor:
    """Return a weight as a checkpoint stores it, quantized from a normal distribution.

    Random codes would not represent trained weights: 1 in 16 random E4M3 codes is zero or subnormal, but only 1 in some
    thousand codes of trained weights is, and the kernels decode these codes in another way.
    """
    weight = torch.randn(shape).to(torch.bfloat16)
    return weight if name == "bf16" else quantize_tensor(weight, SCHEMES[name].weight)


def _make(name: str, shape: Shape, nbytes: int) -> Contender:
    if name in FORMATS:
        weight = source(name, shape)
        first = pack(weight)
        weights = [first, *(pack(weight) for _ in range(_count(nbytes, first.nbytes) - 1))]
        return Contender(name, linear, weights, first.nbytes)
    makers: dict[str, Callable[[str, Shape, int], Contender]] = {
        BASELINE: _torch_bf16,
        FP32: _torch_fp32,
        INT8: _int8,
        TORCHAO: _module,
        QUANTO: _module,
    }
    return makers[name](name, shape, nbytes)


def _torch_bf16(name: str, shape: Shape, nbytes: int) -> Contender:
    weight = torch.randn(shape).to(torch.bfloat16)
    return Contender(name, functional.linear, _copies(weight, nbytes), weight.nbytes)


def _torch_fp32(name: str, shape: Shape, nbytes: int) -> Contender:
    weight = torch.randn(shape)
    return Contender(name, functional.linear, _copies(weight, nbytes), weight.nbytes, torch.float32)


def _int8(name: str, shape: Shape, nbytes: int) -> Contender:
    codes = torch.randint(-100, 100, shape, dtype=torch.int8)
    scale = torch.rand(shape[0], dtype=torch.bfloat16)
    weights = [(codes, scale) for codes in _copies(codes, nbytes)]

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, *weight)  # type: ignore[no-any-return]

    return Contender(name, multiply, weights, codes.nbytes + scale.nbytes)


def _module(name: str, shape: Shape, nbytes: int) -> Contender:
    """Return a peer that replaces the weight of a module."""
    size = math.prod(shape) * torch.float8_e4m3fn.itemsize
    make = _torchao if name == TORCHAO else _quanto
    weights = [make(shape) for _ in range(_count(nbytes, size))]

    def multiply(x: Tensor, model: torch.nn.Module) -> Any:
        return model(x)

    return Contender(name, multiply, weights, size)


def _torchao(shape: Shape) -> torch.nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    module = _linear(shape)
    quantize_(module, Float8WeightOnlyConfig())
    return module


def _quanto(shape: Shape) -> torch.nn.Module:
    from optimum.quanto import freeze, qfloat8, quantize

    model = torch.nn.Sequential(_linear(shape))
    quantize(model, weights=qfloat8)
    freeze(model)
    return model


def _linear(shape: Shape) -> torch.nn.Linear:
    return torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16).requires_grad_(False)


def _copies(weight: Tensor, nbytes: int) -> list[Tensor]:
    return [weight.clone() for _ in range(_count(nbytes, weight.nbytes))]


def _count(nbytes: int, each: int) -> int:
    return max(1, math.ceil(nbytes / each))


def _check_memory(count: int, shape: Shape, nbytes: int) -> None:
    largest = math.prod(shape) * torch.float32.itemsize
    need = count * (nbytes + largest)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > free:
        raise UsageError(
            f"{count} contenders with {nbytes / 1e9:g} GB of weights each need up to {need / 1e9:.1f} GB of memory, "
            f"{free / 1e9:.1f} GB are free: ask for fewer --formats or --peers, or fewer --gigabytes"
        )


def _installed(package: str) -> bool:
    top, _, rest = package.partition(".")
    return importlib.util.find_spec(top) is not None and (not rest or importlib.util.find_spec(package) is not None)
