"""What hardware offers: memory, bandwidth, and operations per second in each format that it multiplies in.

The figures are those of the vendors' data sheets, for dense matrices: sheets print twice as much with structured
sparsity, which no layout here has. Nobody reaches a peak; as a bound it errs on the fast side. Memory is counted in
10^9 bytes, as sheets do; some devices have a few percent more. Links between devices are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import psutil

from minifloat.errors import UsageError, lookup
from minifloat.kernels import processors
from minifloat.kernels.bandwidth import read_bandwidth
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, ElementFormat

_GIGA, _TERA = 10**9, 10**12
#: Read once to measure this machine: larger than any last-level cache, small enough to take a moment.
_PROBE_BYTES, _PROBE_ROUNDS = 1 << 30, 3

CPU = "cpu"


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: Name on the command line.
        title: What it is.
        memory: Bytes.
        bandwidth: Bytes per second that memory is read with.
        peaks: Format -> operations per second (a multiplication and an addition are two), dense, accumulated in
            float32; formats that it does not multiply are missing. Empty: unknown, so that nothing bounds arithmetic.
        source: Where the figures come from.
    """

    name: str
    title: str
    memory: int
    bandwidth: float
    peaks: Mapping[ElementFormat, float] = field(hash=False)
    source: str

    @property
    def ridges(self) -> dict[ElementFormat, float]:
        """Operations per byte from which on arithmetic is the limit, for each format."""
        return {element: peak / self.bandwidth for element, peak in self.peaks.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    name: str, title: str, memory: int, bandwidth: float, bf16: float, fp8: float = 0, fp4: float = 0, *, source: str
) -> Hardware:
    """A row of the table: GB, GB/s, TFLOP/s; 0 where the device does not multiply the format."""
    known = ((BFLOAT16, bf16), (E4M3, fp8), (E2M1, fp4))
    peaks = MappingProxyType({element: peak * _TERA for element, peak in known if peak})
    return Hardware(name, title, memory * _GIGA, bandwidth * _GIGA, peaks, source)


_GPUS = (
    # Sheets with one column of "with sparsity" figures: half of them is dense.
    _gpu("a100-40", "NVIDIA A100 40 GB (Ampere)", 40, 1555, 312, source="NVIDIA A100 data sheet, SXM4 and PCIe"),
    _gpu("a100-80", "NVIDIA A100 80 GB (Ampere)", 80, 2039, 312, source="NVIDIA A100 data sheet, SXM4"),
    _gpu("l40s", "NVIDIA L40S (Ada)", 48, 864, 362.05, 733, source="NVIDIA L40S data sheet"),
    # GeForce: the rates with float32 accumulation, half of those with float16 accumulation.
    _gpu("rtx4090", "NVIDIA RTX 4090 (Ada)", 24, 1008, 165.2, 330.3, source="NVIDIA Ada GPU architecture, appendix A"),
    _gpu("h100", "NVIDIA H100 SXM (Hopper)", 80, 3350, 989.5, 1979, source="NVIDIA H100 data sheet, SXM5"),
    _gpu("h200", "NVIDIA H200 SXM (Hopper)", 141, 4800, 989.5, 1979, source="NVIDIA H200 data sheet, SXM5"),
    _gpu("b200", "NVIDIA B200 (Blackwell)", 180, 8000, 2250, 4500, 9000, source="NVIDIA DGX B200 data sheet, one of 8"),
    # E4M3 of this generation is the FNUZ variant: engines convert codes and scales when they load.
    _gpu("mi300x", "AMD MI300X (CDNA 3)", 192, 5325, 1307.4, 2614.9, source="AMD Instinct MI300X data sheet"),
    _gpu("mi325x", "AMD MI325X (CDNA 3)", 256, 6000, 1307.4, 2614.9, source="AMD Instinct MI325X data sheet"),
    _gpu("mi355x", "AMD MI355X (CDNA 4)", 288, 8000, 2516.6, 5033.2, 10066.3, source="AMD Instinct MI355X data sheet"),
)

#: By the name on the command line; ``cpu`` is the machine that asks.
HARDWARE: dict[str, Hardware | None] = {CPU: None, **{gpu.name: gpu for gpu in _GPUS}}


def get_hardware(name: str, *, bandwidth: float | None = None, peak: float | None = None) -> Hardware:
    """The device of that name.

    Args:
        name: A name of `HARDWARE`. For ``cpu`` the memory is this machine's, and so is the bandwidth, which is
            measured (half a second) unless it is given.
        bandwidth: Bytes per second in place of the data sheet's or the measured figure.
        peak: BF16 operations per second in place of the data sheet's; other formats keep their ratio to it.

    Raises:
        UnknownNameError: No such device; the message lists the names.
        UsageError: A figure that is not positive.
        KernelUnavailable: ``cpu`` without a bandwidth, and no native library to measure it with.
    """
    for option, value in (("bandwidth", bandwidth), ("peak", peak)):
        if value is not None and not value > 0:
            raise UsageError(f"{option}: expected a positive number, got {value}")
    found = lookup("hardware", name, HARDWARE)
    if found is None:
        return _this_machine(bandwidth, peak)
    if bandwidth is not None:
        found = replace(found, bandwidth=bandwidth, source=f"{found.source}; bandwidth as given")
    if peak is not None:
        factor = peak / found.peaks[BFLOAT16]
        peaks = MappingProxyType({element: value * factor for element, value in found.peaks.items()})
        found = replace(found, peaks=peaks, source=f"{found.source}; peak as given")
    return found


def _this_machine(bandwidth: float | None, peak: float | None) -> Hardware:
    """Our CPU kernels decode weights to BF16 or float32, so there is no other arithmetic."""
    threads = processors.available()
    how = "bandwidth as given"
    if bandwidth is None:
        bandwidth = read_bandwidth(_PROBE_BYTES, threads, _PROBE_ROUNDS).median
        how = f"bandwidth measured with {threads} threads"
    peaks = MappingProxyType({} if peak is None else {BFLOAT16: peak})
    memory = int(psutil.virtual_memory().total)
    return Hardware(CPU, f"this machine, {threads} cores", memory, bandwidth, peaks, how)
