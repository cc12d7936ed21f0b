"""Overlaps the start of a Triton kernel with the end of the one before it: programmatic dependent launch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,unused-ignore"

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minifloat.kernels.triton_runtime import is_interpreted

# From compute capability 9.0 on a kernel may start before the one ahead has ended. Until `wait` returns it must neither
# read what an earlier kernel writes, nor write. Source: CUDA programming guide, "Programmatic Dependent Launch".

#: The environment variable that switches the overlap off: 0.
VARIABLE = "MINIFLOAT_GPU_OVERLAP"
_MIN_CAPABILITY = (9, 0)
#: Bytes of a line of the L2 cache.
LINE_BYTES = tl.constexpr(128)


def overlaps(device: torch.device) -> bool:
    """Return whether kernels on a device are launched so; kernels take it as the constant OVERLAP."""
    return device.type == "cuda" and _overlaps(device.index or 0)


def launch_options(overlap: bool) -> dict[str, Any]:
    """Return the options of a launch; Triton's interpreter knows no ``launch_pdl``."""
    return {"launch_pdl": True} if overlap else {}


@functools.cache
def _overlaps(index: int) -> bool:
    wanted = os.environ.get(VARIABLE, "1") != "0" and not is_interpreted()
    return wanted and torch.cuda.get_device_capability(index) >= _MIN_CAPABILITY


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Allow the next kernel to start as soon as there is room, then wait for the end of the kernels before."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Read the lines of memory at `pointers`, one each, into the L2 cache; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
