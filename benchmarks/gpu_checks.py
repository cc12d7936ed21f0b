"""Sections "checks" and "tests" of `benchmarks/gpu.py`: GPU kernels against float64, and the tests that need a GPU.

The outputs are written into memory that held NaN, so that an element that was not written shows.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from gpu_contenders import OURS, make
from gpu_quantizers import KINDS, quantize
from gpu_run import Run
from torch import Tensor

from minifloat.kernels.inputs import quantize_inputs
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

ROWS = (1, 3, 16, 17, 64, 129)
SHAPES = ((384, 512), (4096, 4096), (28672, 4096))
#: Limits of the relative L2 error. Rounding to bfloat16 alone gives 1.7e-3; tensor cores that keep only 14 bits while
#: they add FP8 products give as much.
BARS = {"weights": 3e-3, "W8A8": 4e-3}
ROOT = Path(__file__).parents[1]


def checks(run: Run) -> None:
    """Check the quantizers, then the products of every format at every number of rows."""
    exact(run)
    for n, k in ((256, 128),) if run.dry else SHAPES:
        weight = torch.randn(n, k, device=run.device).mul_(0.02).bfloat16()
        for name in OURS:
            if run.left <= 0:
                run.log("check", what=f"{n}x{k} from {name} on", failed="no time left")
                return
            with run.attempt("check", f"{name} {n}x{k}"), torch.inference_mode():
                worst = _worst_error(run, name, weight)
                bar = BARS["W8A8" if "W8A8" in name else "weights"]
                run.log("check", what=f"{name} {n}x{k}", worst_relative_l2=worst, bar=bar, passed=worst <= bar)


def exact(run: Run) -> None:
    """Check that the quantizers are bit-identical to the reference implementation, both on the device."""
    shape = (40, 256) if run.dry else (4001, 4096)
    weight = torch.randn(shape, device=run.device).mul_(0.02).bfloat16()
    amax = float(weight.abs().max())
    for name in KINDS:
        with run.attempt("check", f"quantizing weights to {name}"):
            expected = quantize_tensor(weight, SCHEMES[name].weight)
            codes, scales = quantize(run, weight, SCHEMES[name].weight, amax)
            same = torch.equal(codes, expected.codes) and torch.equal(scales, expected.scale)
            run.log("check", what=f"quantizing weights to {name}", bar="every bit", passed=same)
    for name, scheme in SCHEMES.items():
        if scheme.activation is None or scheme.activation.scale is not FLOAT32:
            continue
        with run.attempt("check", f"quantizing inputs of {name}"), torch.inference_mode():
            scale = None if scheme.activation.dynamic else torch.tensor(0.01, device=run.device)
            same = True
            for m in ROWS:
                x = torch.randn(m, shape[1], device=run.device).bfloat16()
                codes, scales = quantize_inputs(x, scheme.activation, scale, impl="auto" if run.dry else "triton")
                expected_codes, grid = quantize_activation(x, scheme.activation, scale)
                same &= torch.equal(codes.view(torch.uint8), expected_codes) and bool((scales == grid).all())
            run.log("check", what=f"quantizing inputs of {name}", bar="every bit", passed=same)


def _worst_error(run: Run, name: str, weight: Tensor) -> float:
    """Return the largest relative L2 error over all numbers of rows; NaN if an element was not written."""
    contender = make(run, name, weight, copies=1)
    scheme = SCHEMES[name.removesuffix(" W8A8")]
    exact_weight = quantize_tensor(weight, scheme.weight).dequantize().double()
    errors = []
    for m in ROWS:
        x = torch.randn(m, weight.shape[1], device=run.device).bfloat16()
        values = x
        if "W8A8" in name and scheme.activation is not None:
            scale = None if scheme.activation.dynamic else torch.tensor(0.01, device=run.device)
            values = dequantize_activation(*quantize_activation(x, scheme.activation, scale), scheme.activation)
        expected = values.double() @ exact_weight.T
        poison = torch.full((m, weight.shape[0]), torch.nan, dtype=torch.bfloat16, device=run.device)
        del poison  # the allocator reuses this memory for the result
        result = contender.multiply(x, contender.weights[0])
        assert isinstance(result, Tensor)
        errors.append(float((result.double() - expected).norm() / expected.norm()))
    return max(errors, key=lambda error: (error != error, error))


def tests(run: Run) -> None:
    """Run the tests that need a GPU, if pytest is installed."""
    if importlib.util.find_spec("pytest") is None:
        run.log("tests", failed="pytest is not installed")
        return
    selected = "nothing_is_called_so" if run.dry else "gpu and not without and not gpus"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected]
    folders = [str(ROOT / "tests" / part) for part in ("kernels", "quantize/test_device.py", "engine")]
    try:
        result = subprocess.run(
            [*command, *folders],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
            timeout=max(run.left, 1),
        )
    except subprocess.TimeoutExpired:
        run.log("tests", failed="no time left")
        return
    nothing_selected = 5
    lines = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))][:20]
    summary = (result.stdout.strip().splitlines() or ["nothing was selected"])[-1]
    run.log("tests", passed=result.returncode == (nothing_selected if run.dry else 0), summary=summary, failures=lines)
