"""The machines that `check` knows: only what decides whether an engine has a kernel there.

Sizes of memory, bandwidth and peaks are in `minifloat.plan.hardware`; they decide how fast a model runs, not whether an
engine loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minifloat.numerics.formats import E2M1, E4M3, ElementFormat


@dataclass(frozen=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: On the command line.
        summary: What it is.
        vendor: ``"cpu"``, ``"nvidia"`` or ``"amd"``.
        capability: CUDA's compute capability as engines write it (90 is 9.0); of AMD the digits of gfx94x; 0 of a CPU.
        arithmetic: Quantized formats that it multiplies; other weights are converted to 16 bits first.
        amx: Whether it is a CPU that multiplies tiles (Intel's AMX: Xeon since Sapphire Rapids; no AMD).
        fnuz: Whether its E4M3 is the variant with bias 8 and no negative zero, half of OCP's E4M3 for the same code.
    """

    name: str
    summary: str
    vendor: str
    capability: int
    arithmetic: tuple[ElementFormat, ...] = ()
    amx: bool = False
    fnuz: bool = False


HARDWARE: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        Hardware("cpu", "x86 with AMX", "cpu", 0, amx=True),
        Hardware("cpu-no-amx", "x86 without AMX", "cpu", 0),
        Hardware("a100", "NVIDIA Ampere", "nvidia", 80),
        Hardware("l40s", "NVIDIA Ada", "nvidia", 89, (E4M3,)),
        Hardware("h100", "NVIDIA Hopper", "nvidia", 90, (E4M3,)),
        Hardware("h200", "NVIDIA Hopper", "nvidia", 90, (E4M3,)),
        Hardware("b200", "NVIDIA Blackwell", "nvidia", 100, (E4M3, E2M1)),
        Hardware("mi300", "AMD CDNA 3", "amd", 94, (E4M3,), fnuz=True),
    )
}


def hardware_where(condition: Callable[[Hardware], bool]) -> tuple[str, ...]:
    """The names of the machines that are so."""
    return tuple(name for name, hardware in HARDWARE.items() if condition(hardware))
