"""The machines that `plan` and `check` know: memory, bandwidth, peaks, and generation of processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from minifloat.errors import UsageError, lookup
from minifloat.kernels import processors
from minifloat.kernels.memory import total_memory
from minifloat.kernels.speed import measure_product_rate, read_bandwidth
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, ElementFormat

_GIGA, _TERA = 10**9, 10**12
#: Bytes that are read to measure this machine's bandwidth (more than any last-level cache), and how often.
_PROBE_BYTES, _PROBE_ROUNDS = 1 << 30, 3

CPU = "cpu"
APPLE = "apple"


@dataclass(frozen=True)
class HardwareGeneration:
    """A generation of processors, which decides whether an engine has a kernel for a format."""

    name: str
    vendor: str
    capability: int = 0
    arithmetic: tuple[ElementFormat, ...] = ()
    amx: bool = False
    fnuz: bool = False


_UNKNOWN = HardwareGeneration("unknown", "")
_AMPERE = HardwareGeneration("NVIDIA Ampere", "nvidia", 80)
_ADA = HardwareGeneration("NVIDIA Ada", "nvidia", 89, (E4M3,))
_HOPPER = HardwareGeneration("NVIDIA Hopper", "nvidia", 90, (E4M3,))
_BLACKWELL = HardwareGeneration("NVIDIA Blackwell", "nvidia", 100, (E4M3, E2M1))
_CDNA_3 = HardwareGeneration("AMD CDNA 3", "amd", 94, (E4M3,), fnuz=True)
_CDNA_4 = HardwareGeneration("AMD CDNA 4", "amd", 95, (E4M3, E2M1))


@dataclass(frozen=True)
class Hardware:
    """One device of a kind of machine."""

    name: str
    title: str
    memory: int = 0
    bandwidth: float = 0.0
    peaks: Mapping[ElementFormat, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    source: str = ""
    generation: HardwareGeneration = _UNKNOWN

    @property
    def ridges(self) -> dict[ElementFormat, float]:
        """Operations per byte from which on arithmetic is the limit, for each format."""
        return {element: peak / self.bandwidth for element, peak in self.peaks.items()}

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "memory": self.memory,
            "bandwidth": self.bandwidth,
            "peaks": {element.name: peak for element, peak in self.peaks.items()},
            "ridges": {element.name: ridge for element, ridge in self.ridges.items()},
            "source": self.source,
        }


def _gpu(
    name: str,
    title: str,
    generation: HardwareGeneration,
    memory: int,
    bandwidth: float,
    peaks: tuple[float, ...],
    source: str,
) -> Hardware:
    """Return a row with the figures of a data sheet: GB, GB/s, and TFLOP/s of BF16 and of each format it multiplies."""
    elements = (BFLOAT16, *generation.arithmetic)
    by_element = MappingProxyType({element: peak * _TERA for element, peak in zip(elements, peaks, strict=True)})
    return Hardware(name, title, memory * _GIGA, bandwidth * _GIGA, by_element, source, generation)


_ROWS = (
    Hardware(CPU, "x86 with AMX", generation=HardwareGeneration("x86 with AMX", "cpu", amx=True)),
    Hardware("cpu-no-amx", "x86 without AMX", generation=HardwareGeneration("x86 without AMX", "cpu")),
    Hardware(APPLE, "Apple silicon", generation=HardwareGeneration("Apple silicon", APPLE)),
    Hardware("a100", "NVIDIA A100 (Ampere)", generation=_AMPERE),
    Hardware("mi300", "AMD MI300 (CDNA 3)", generation=_CDNA_3),
    # Sheets with one column of "with sparsity" figures: half of them is dense.
    _gpu("a100-40", "NVIDIA A100 40 GB (Ampere)", _AMPERE, 40, 1555, (312,), "NVIDIA A100 data sheet, SXM4 and PCIe"),
    _gpu("a100-80", "NVIDIA A100 80 GB (Ampere)", _AMPERE, 80, 2039, (312,), "NVIDIA A100 data sheet, SXM4"),
    _gpu("l40s", "NVIDIA L40S (Ada)", _ADA, 48, 864, (362.05, 733), "NVIDIA L40S data sheet"),
    # GeForce: the rates with float32 accumulation, half of those with float16 accumulation.
    _gpu("rtx4090", "NVIDIA RTX 4090 (Ada)", _ADA, 24, 1008, (165.2, 330.3), "NVIDIA Ada GPU architecture, appendix A"),
    _gpu("h100", "NVIDIA H100 SXM (Hopper)", _HOPPER, 80, 3350, (989.5, 1979), "NVIDIA H100 data sheet, SXM5"),
    _gpu("h200", "NVIDIA H200 SXM (Hopper)", _HOPPER, 141, 4800, (989.5, 1979), "NVIDIA H200 data sheet, SXM5"),
    _gpu(
        "b200",
        "NVIDIA B200 (Blackwell)",
        _BLACKWELL,
        180,
        8000,
        (2250, 4500, 9000),
        "NVIDIA DGX B200 data sheet, one of 8",
    ),
    _gpu("mi300x", "AMD MI300X (CDNA 3)", _CDNA_3, 192, 5325, (1307.4, 2614.9), "AMD Instinct MI300X data sheet"),
    _gpu("mi325x", "AMD MI325X (CDNA 3)", _CDNA_3, 256, 6000, (1307.4, 2614.9), "AMD Instinct MI325X data sheet"),
    _gpu(
        "mi355x", "AMD MI355X (CDNA 4)", _CDNA_4, 288, 8000, (2516.6, 5033.2, 10066.3), "AMD Instinct MI355X data sheet"
    ),
)
_TABLE = {machine.name: machine for machine in _ROWS}

#: Machines that `plan` accepts, by the name on the command line; ``cpu`` is this machine, measured by `get_hardware`.
PLANNED_HARDWARE = {name: machine for name, machine in _TABLE.items() if machine.peaks or name == CPU}
#: Machines that the rules of `check` were read for, by the name on the command line.
ENGINE_HARDWARE = {name: _TABLE[name] for name in (CPU, "cpu-no-amx", "a100", "l40s", "h100", "h200", "b200", "mi300")}
#: Machines of engines that run on no server, by the name on the command line.
LOCAL_HARDWARE = {name: _TABLE[name] for name in (APPLE, CPU, "cpu-no-amx")}


def get_hardware(name: str, *, bandwidth: float | None = None, peak: float | None = None) -> Hardware:
    """Return the device of a name."""
    for option, value in (("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not value > 0:
            raise UsageError(f"{option}: expected a positive number, got {value}")
    device = lookup("hardware", name, PLANNED_HARDWARE)
    if device.name == CPU:
        return _this_machine(bandwidth, peak)
    if bandwidth is not None:
        device = replace(device, bandwidth=bandwidth, source=f"{device.source}; bandwidth as given")
    if peak is not None:
        factor = peak / device.peaks[BFLOAT16]
        peaks = MappingProxyType({element: value * factor for element, value in device.peaks.items()})
        device = replace(device, peaks=peaks, source=f"{device.source}; peak as given")
    return device


def _this_machine(bandwidth: float | None, peak: float | None) -> Hardware:
    """Return this machine; its only peak is that of BF16, because our CPU kernels decode weights to BF16 or float32."""
    threads = processors.available()
    measured = [name for name, value in (("bandwidth", bandwidth), ("peak", peak)) if value is None]
    given = [name for name in ("bandwidth", "peak") if name not in measured]
    if bandwidth is None:
        bandwidth = read_bandwidth(_PROBE_BYTES, threads, _PROBE_ROUNDS).median
    if peak is None:
        peak = measure_product_rate(threads)
    source = [f"{' and '.join(given)} as given"] if given else []
    source += [f"{' and '.join(measured)} measured with {threads} threads"] if measured else []
    peaks = MappingProxyType({BFLOAT16: peak})
    return Hardware(CPU, f"this machine, {threads} cores", total_memory(), bandwidth, peaks, "; ".join(source))
