"""Section "quantizers" of `benchmarks/gpu.py`: bytes read and written per second when weights and inputs are quantized.

The tensors together are larger than the caches, so that they are read from memory.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from gpu_contenders import ROTATED_BYTES
from gpu_run import Run, Timing, clock
from torch import Tensor

from minifloat.kernels.inputs import quantize_inputs
from minifloat.kernels.quantize import quantize_rows
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import SCHEMES, WeightSpec

SHAPE, DRY_SHAPE = (28672, 4096), (64, 256)
ROWS, DRY_ROWS = (1, 16, 256, 4096), (1, 16)
KINDS = ("fp8", "fp8-block", "fp8-static", "mxfp8", "mxfp4", "nvfp4")


def quantizers(run: Run) -> None:
    """Measure quantizing weights to every scheme of `KINDS`, then inputs as every scheme declares them."""
    shape = DRY_SHAPE if run.dry else SHAPE
    weights = _rotated(run, torch.randn(shape, device=run.device).mul_(0.02).bfloat16())
    for name in KINDS:
        with run.attempt("quantizer", f"weights {name}"):
            spec = SCHEMES[name].weight
            written = spec.bits_per_weight(shape) / 8 * weights[0].numel()
            calls = [partial(quantize, run, weight, spec, 0.12) for weight in weights]
            _log(run, f"weights {name}", clock(run, calls), weights[0].nbytes + written)
    del weights
    for rows in DRY_ROWS if run.dry else ROWS:
        inputs = _rotated(run, torch.randn(rows, shape[1], device=run.device).bfloat16())
        for name, scheme in SCHEMES.items():
            if scheme.activation is None or scheme.activation.scale is not FLOAT32:
                continue
            with run.attempt("quantizer", f"inputs {name} M={rows}"), torch.inference_mode():
                scale = None if scheme.activation.dynamic else torch.tensor(0.01, device=run.device)
                impl = "auto" if run.dry else "triton"
                calls = [partial(quantize_inputs, x, scheme.activation, scale, impl=impl) for x in inputs]
                _log(run, f"inputs {name} M={rows}", clock(run, calls), inputs[0].numel() * (inputs[0].itemsize + 1))


def _log(run: Run, what: str, timing: Timing, nbytes: float) -> None:
    gbps = nbytes / timing.seconds / 1e9
    run.log("quantizer", what=what, us=timing.seconds * 1e6, gbps=gbps, read_share=run.share("read_gbps", gbps))


def quantize(run: Run, weight: Tensor, spec: WeightSpec, amax: float) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a bfloat16 weight from the GPU kernel; in a dry run from the CPU kernel."""
    if run.dry:
        data = weight.view(torch.uint8).numpy().reshape(-1)
        written = quantize_rows(data, "BF16", (weight.shape[0], weight.shape[1]), spec, tensor_amax=amax)
        return torch.from_numpy(written.codes), torch.from_numpy(written.scales)
    from minifloat.kernels.quantize import triton

    rows, cols = weight.shape
    bits = spec.element.bits
    codes = torch.empty(rows, cols * bits // 8, dtype=torch.uint8, device=weight.device)
    dtype = torch.float32 if spec.scale.bits > 8 else torch.uint8
    scales = torch.empty(spec.granularity.scale_shape((rows, cols)), dtype=dtype, device=weight.device)
    triton.launch(weight.view(torch.int16), spec, amax, codes, scales)
    return codes, scales


def _rotated(run: Run, tensor: Tensor) -> list[Tensor]:
    count = 2 if run.dry else max(1, math.ceil(ROTATED_BYTES / tensor.nbytes))
    return [tensor, *(tensor.clone() for _ in range(min(count, 64) - 1))]
