"""A GPU as products see it: whether kernels can run, its properties, and counters in its memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.kernels.triton_runtime import why_unavailable

#: The first compute capability with bfloat16 tensor cores and asynchronous copies.
MIN_CAPABILITY = (8, 0)
#: Shared memory available to one CTA. Source: CUDA programming guide, technical specifications per compute capability.
_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}
#: Maximum number of tiles of the result with counters in one launch.
MAX_TILES = 1 << 12
_STREAMS = 128
#: Counters tell a CTA whether it is the last of its tile; the last sets them to zero again. Each stream has a row of
#: them, zeroed once: a captured graph could not zero new ones, and uses the row of the stream that it was captured on.
#: For each device: the rows of counters, and the index of the row by stream.
_ROWS: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that determine the configuration."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    name: str = ""

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Device:
        """Return the properties of a device of this machine."""
        properties = torch.cuda.get_device_properties(device)
        return cls(
            (properties.major, properties.minor),
            properties.multi_processor_count,
            _SHARED_BYTES.get((properties.major, properties.minor), min(_SHARED_BYTES.values())),
            properties.name,
        )


def why_not(device: torch.device | str = "cuda") -> str:
    """Return why the kernels cannot compute on a device; empty if they can."""
    return _why_not(torch.device(device))


# `torch.compile` cannot trace the search for triton. This mark is what `torch.compiler.assume_constant_result` sets,
# which imports the compiler: that takes longer than the rest of the package.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device}"
    reason = why_unavailable(str(device))
    if reason:
        return reason
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels decode with instructions of NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need {needed}"
    return ""


def prepare(device: torch.device) -> None:
    """Allocate the counters of a device, which is not possible while a graph is captured."""
    if device not in _ROWS:
        _ROWS[device] = torch.zeros((_STREAMS, MAX_TILES), dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)


def take(device: torch.device, tiles: int) -> Tensor:
    """Return at least `tiles` zeros, int32, for a launch on the current stream."""
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    prepare(device)
    counters, rows = _ROWS[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream, len(rows))
    if row < _STREAMS and tiles <= MAX_TILES:
        return counters[row]
    return torch.zeros(tiles, dtype=torch.int32, device=device)
