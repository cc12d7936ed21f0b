"""Who multiplies in `benchmarks/gpu.py`: torch in BF16, our weights, W8A8, and what else is installed.

A contender is made for a shape: weights of its own, so many that together they are larger than the caches, and how one
is multiplied. Who cannot be made says why.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_run import Run
from torch import Tensor
from torch.nn import functional

from minifloat.kernels.linear import linear
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

BASELINE = "torch BF16"
WEIGHT_ONLY = ("fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4")
W8A8 = ("fp8-dynamic", "fp8-static", "fp8-block")
COMPILED, SCALED, SCALED_FAST = (
    "torch.compile(dequantize, linear)",
    "scaled_mm alone",
    "scaled_mm alone, fast accumulation",
)
GEMLITE, MARLIN = "gemlite", "vLLM Marlin FP8"
OURS = (*WEIGHT_ONLY, *(f"{name} W8A8" for name in W8A8))
PEERS = (SCALED, SCALED_FAST, COMPILED, GEMLITE, MARLIN)
#: Together the weights of a contender are at least this large: four times the L2 cache of an H200.
ROTATED_BYTES = 256 << 20

Multiply = Callable[[Tensor, Any], Tensor]
#: How a weight is multiplied, the weight, and its bytes.
Made = tuple[Multiply, Any, int]


@dataclass(frozen=True)
class Contender:
    """One way to multiply.

    Attributes:
        name: Its name in tables.
        multiply: ``multiply(x, weight)``.
        weights: What that takes, each in memory of its own.
        nbytes: Bytes of one, with its scales.
    """

    name: str
    multiply: Multiply
    weights: Sequence[Any]
    nbytes: int


def make(run: Run, name: str, weight: Tensor, copies: int | None = None) -> Contender:
    """A contender for a weight ``[N, K]`` in bfloat16 on the device.

    Args:
        run: The run.
        name: One of `OURS` or `PEERS`, or `BASELINE`.
        weight: What it multiplies.
        copies: Of the weight; by default so many that they do not fit into caches.

    Raises:
        Exception: Of whatever kind, where it cannot be made here; the message says why.
    """
    makers: dict[str, Callable[[Run, str, Tensor], Made]] = {
        BASELINE: lambda _, __, weight: (functional.linear, weight, weight.nbytes),
        **dict.fromkeys(WEIGHT_ONLY, _weight_only),
        **{f"{scheme} W8A8": _w8a8 for scheme in W8A8},
        SCALED: _scaled_mm,
        SCALED_FAST: _scaled_mm,
        COMPILED: _compiled,
        GEMLITE: _gemlite,
        MARLIN: _marlin,
    }
    multiply, held, nbytes = makers[name](run, name, weight)
    count = copies or (2 if run.dry else max(1, math.ceil(ROTATED_BYTES / nbytes)))
    return Contender(name, multiply, [held, *(copy.deepcopy(held) for _ in range(count - 1))], nbytes)


def _weight_only(run: Run, name: str, weight: Tensor) -> Made:
    quantized = quantize_tensor(weight, SCHEMES[name].weight)
    return linear, _packed(run, quantized), quantized.nbytes


def _packed(run: Run, weight: QuantizedTensor) -> Any:
    """The form of the kernels of a GPU; in a dry run as stored, for the reference."""
    if run.dry:
        return weight
    from minifloat.kernels.linear import triton as gpu

    reason = gpu.why_not(weight.spec, weight.shape, run.device)
    if reason:
        raise RuntimeError(reason)
    return gpu.pack(weight)


def _w8a8(run: Run, name: str, weight: Tensor) -> Made:
    scheme = SCHEMES[name.removesuffix(" W8A8")]
    quantized = quantize_tensor(weight, scheme.weight)
    activation = scheme.activation
    assert activation is not None
    scale = None if activation.dynamic else torch.tensor(0.01, device=run.device)
    impl = "auto" if run.dry else "scaled_mm"

    def multiply(x: Tensor, held: QuantizedTensor) -> Tensor:
        return linear(x, held, activation=activation, input_scale=scale, impl=impl)

    return multiply, quantized, quantized.nbytes


def _scaled_mm(run: Run, name: str, weight: Tensor) -> Made:
    """The product of codes alone, scales per row: inputs are taken as quantized already."""
    quantized = quantize_tensor(weight, SCHEMES["fp8"].weight)
    fp8 = torch_dtype(quantized.spec.element)
    row_wise = functional.ScalingType.RowWise
    ones: dict[int, tuple[Tensor, Tensor]] = {}

    def multiply(x: Tensor, held: tuple[Tensor, Tensor]) -> Tensor:
        if x.shape[0] not in ones:
            ones[x.shape[0]] = x.to(fp8), torch.ones(x.shape[0], 1, device=x.device)
        codes, scale = ones[x.shape[0]]
        return functional.scaled_mm(
            codes, held[0].t(), scale, row_wise, held[1], row_wise, output_dtype=torch.bfloat16,
            use_fast_accum=name == SCALED_FAST,
        )  # fmt: skip

    held = quantized.codes.view(fp8), quantized.scale.reshape(1, -1).contiguous()
    return multiply, held, quantized.nbytes


def _compiled(run: Run, name: str, weight: Tensor) -> Made:
    quantized = quantize_tensor(weight, SCHEMES["fp8"].weight)

    def plain(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return functional.linear(x, codes.to(torch.bfloat16) * scale)

    torch._dynamo.reset()  # it gives up on a function that it has compiled for too many shapes
    run_it = plain if run.dry else torch.compile(plain, dynamic=False)
    held = quantized.codes.view(torch_dtype(quantized.spec.element)), quantized.scale.bfloat16()
    return lambda x, w: run_it(x, *w), held, quantized.nbytes


def _gemlite(run: Run, name: str, weight: Tensor) -> Made:
    """Whatever weight-only 8-bit form the installed version has."""
    from gemlite import helper

    processor = getattr(helper, "A16W8_FP8", None) or helper.A16W8
    module = processor(device=str(run.device)).from_weights(weight, None)
    return lambda x, held: held(x), module, weight.numel()


def _marlin(run: Run, name: str, weight: Tensor) -> Made:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        apply_fp8_marlin_linear,
        marlin_quant_fp8_torch,
    )

    _, codes, scales = marlin_quant_fp8_torch(weight, -1)
    workspace = marlin_make_workspace_new(run.device)
    n, k = weight.shape

    def multiply(x: Tensor, held: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = apply_fp8_marlin_linear(x, *held, workspace, n, k, None)
        return y

    return multiply, (codes, scales), codes.nbytes + scales.nbytes
