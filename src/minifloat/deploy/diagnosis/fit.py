"""Which engine and which scheme suit a machine: the formats that it multiplies, and the bytes that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from minifloat.deploy.diagnosis.gpu import Gpu
from minifloat.deploy.diagnosis.machine import Machine
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.numerics.formats import E2M1, E4M3


def fitting(machine: Machine, gpus: Sequence[Gpu], engines: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences: an engine, a scheme, and the reason."""
    names = {gpu.hardware for gpu in gpus}
    for name in sorted(filter(None, names)):
        arithmetic = ENGINE_HARDWARE[name].generation.arithmetic
        where = "is here" if "vllm" in engines else "is not here: in an environment of its own, pip install vllm"
        if E4M3 not in arithmetic:
            reason = "it has no FP8 arithmetic, so kernels decode the weights to 16 bits"
            schemes = "fp8-dynamic, or mxfp4"
        elif E2M1 in arithmetic:
            reason = "it multiplies FP8 and FP4"
            schemes = "fp8-block, or mxfp4-w4a4 or nvfp4-w4a4 where `minifloat compare` accepts it"
        else:
            reason = "it multiplies FP8"
            schemes = "fp8-block (or fp8-dynamic), or mxfp4 for the fewest bytes per step"
        yield f"{name}: vLLM ({where}) with --scheme {schemes}; {reason}"
    if gpus and None in names:
        yield "a GPU that the tables of `check` do not have: `minifloat serve --device cuda`, or vLLM after a try"
    if not gpus and machine.instruction_set is not None:
        yield (
            "this CPU: minifloat's own engine (`minifloat serve`), with --scheme mxfp4 (about a quarter of the "
            "bytes that a step reads) or fp8-block (about half); `minifloat bench` measures both, `compare` judges them"
        )
