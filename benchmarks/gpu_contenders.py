"""The contenders of `benchmarks/gpu.py`: torch in BF16, our weight-only formats, W8A8, and other installed libraries.

A contender is made for one weight shape: enough copies of the weight that together they are larger than the caches, and
a function that multiplies one of them. A contender that cannot run raises an error with the reason.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from gpu_run import Run
from timing import Contender
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
#: Smallest total size of a contender's weights: four times the L2 cache of an H200.
ROTATED_BYTES = 256 << 20

Multiply = Callable[[Tensor, Any], Tensor]
#: The function that multiplies, the weight in the form that it takes, and the bytes of that weight.
Parts = tuple[Multiply, Any, int]


def make(run: Run, name: str, weight: Tensor, copies: int | None = None) -> Contender:
    """Return the contender for a bfloat16 weight ``[N, K]`` on the device.

    Args:
        run: The run.
        name: One of `OURS` or `PEERS`, or `BASELINE`.
        weight: The weight.
        copies: Number of copies of the weight; by default so many that they do not fit into the caches.

    Raises:
        Exception: If the contender cannot run here, with any exception type; the message gives the reason.
    """
    makers: dict[str, Callable[[Run, str, Tensor], Parts]] = {
        BASELINE: lambda _, __, weight: (functional.linear, weight, weight.nbytes),
        **dict.fromkeys(WEIGHT_ONLY, _weight_only),
        **{f"{scheme} W8A8": _w8a8 for scheme in W8A8},
        SCALED: _scaled_mm,
        SCALED_FAST: _scaled_mm,
        COMPILED: _compiled,
        GEMLITE: _gemlite,
        MARLIN: _marlin,
    }
    multiply, prepared, nbytes = makers[name](run, name, weight)
    count = copies or (2 if run.dry else max(1, math.ceil(ROTATED_BYTES / nbytes)))
    return Contender(name, multiply, [prepared, *(copy.deepcopy(prepared) for _ in range(count - 1))], nbytes)


def _weight_only(run: Run, name: str, weight: Tensor) -> Parts:
    quantized = quantize_tensor(weight, SCHEMES[name].weight)
    return linear, _packed(run, quantized), quantized.nbytes


def _packed(run: Run, weight: QuantizedTensor) -> Any:
    """Return the weight packed for the GPU kernels; in a dry run as it is stored, for the reference kernels."""
    if run.dry:
        return weight
    from minifloat.kernels.linear import triton as gpu

    reason = gpu.why_not(weight.spec, weight.shape, run.device)
    if reason:
        raise RuntimeError(reason)
    return gpu.pack(weight)


def _w8a8(run: Run, name: str, weight: Tensor) -> Parts:
    scheme = SCHEMES[name.removesuffix(" W8A8")]
    quantized = quantize_tensor(weight, scheme.weight)
    activation = scheme.activation
    assert activation is not None
    scale = None if activation.dynamic else torch.tensor(0.01, device=run.device)
    impl = "auto" if run.dry else "scaled_mm"

    def multiply(x: Tensor, weight: QuantizedTensor) -> Tensor:
        return linear(x, weight, activation=activation, input_scale=scale, impl=impl)

    return multiply, quantized, quantized.nbytes


def _scaled_mm(run: Run, name: str, weight: Tensor) -> Parts:
    """Return the parts of `scaled_mm` alone, with scales per row; the inputs are already quantized."""
    quantized = quantize_tensor(weight, SCHEMES["fp8"].weight)
    fp8 = torch_dtype(quantized.spec.element)
    row_wise = functional.ScalingType.RowWise
    inputs: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of rows

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        if x.shape[0] not in inputs:
            inputs[x.shape[0]] = x.to(fp8), torch.ones(x.shape[0], 1, device=x.device)
        codes, scale = inputs[x.shape[0]]
        return functional.scaled_mm(
            codes, weight[0].t(), scale, row_wise, weight[1], row_wise, output_dtype=torch.bfloat16,
            use_fast_accum=name == SCALED_FAST,
        )  # fmt: skip

    return multiply, (quantized.codes.view(fp8), quantized.scale.reshape(1, -1).contiguous()), quantized.nbytes


def _compiled(run: Run, name: str, weight: Tensor) -> Parts:
    quantized = quantize_tensor(weight, SCHEMES["fp8"].weight)

    def plain(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return functional.linear(x, codes.to(torch.bfloat16) * scale)

    torch._dynamo.reset()  # dynamo stops compiling a function after too many shapes
    compiled = plain if run.dry else torch.compile(plain, dynamic=False)
    codes_and_scale = quantized.codes.view(torch_dtype(quantized.spec.element)), quantized.scale.bfloat16()
    return lambda x, w: compiled(x, *w), codes_and_scale, quantized.nbytes


def _gemlite(run: Run, name: str, weight: Tensor) -> Parts:
    """Return the parts of gemlite's weight-only FP8 product, or of its INT8 product if the version has no FP8."""
    from gemlite import helper

    processor = getattr(helper, "A16W8_FP8", None) or helper.A16W8
    module = processor(device=str(run.device)).from_weights(weight, None)
    return lambda x, linear_module: linear_module(x), module, weight.numel()


def _marlin(run: Run, name: str, weight: Tensor) -> Parts:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        apply_fp8_marlin_linear,
        marlin_quant_fp8_torch,
    )

    _, codes, scales = marlin_quant_fp8_torch(weight, -1)
    workspace = marlin_make_workspace_new(run.device)
    n, k = weight.shape

    def multiply(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        y: Tensor = apply_fp8_marlin_linear(x, *weight, workspace, n, k, None)
        return y

    return multiply, (codes, scales), codes.nbytes + scales.nbytes
