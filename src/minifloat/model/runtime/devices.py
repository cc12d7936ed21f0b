"""Devices by their names, and memory that goes back to the system while a model is loaded."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from minifloat.errors import KernelUnavailable, UsageError

#: Compute capability of Ampere, the first with BF16 arithmetic.
_OLDEST = (8, 0)


def device_named(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda" (the current GPU) or "cuda:N"."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise KernelUnavailable(f"device {name}: torch {torch.__version__} sees no NVIDIA GPU here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelUnavailable(f"device {name}: torch sees {torch.cuda.device_count()} GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        found = ".".join(map(str, capability))
        raise KernelUnavailable(f"device {name}: compute capability {found}; the kernels need 8.0 (Ampere) or newer")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, on which kernels are launched; each thread begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


#: Source: malloc.h of glibc; its own adjustment of the thresholds ends at DEFAULT_MMAP_THRESHOLD_MAX and twice that.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
#: Pieces of this many bytes and more are mapped one by one while a model is loaded.
_PIECE = 256 << 10


@contextlib.contextmanager
def returned_when_freed() -> Iterator[None]:
    """Within the context, return large pieces to the system when they are freed; afterwards glibc reuses them again.

    glibc keeps freed pieces of up to 32 MiB in heaps: a BF16 model of 2.2 GB, read weight by weight, held 4.2 GB.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _PIECE)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        library.malloc_trim(0)
