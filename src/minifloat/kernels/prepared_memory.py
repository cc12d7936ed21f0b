"""Memory for packed weights that the system provides while the process still imports torch.

The system finds, clears and maps pages when they are first touched. In a virtual machine whose host gives memory back,
that takes seconds per GB (2 s on the machine of docs/results.md), while the imports of a process use one processor. So
`prepare` touches the pages in a thread of its own, and `take` hands them to `minifloat.kernels.pack.memory.allocate`.

Imports no torch. Does nothing where it would harm: on machines with several NUMA nodes, where the threads that read a
weight should touch it first; where less memory is free than is asked for; on systems other than Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from pathlib import Path

HUGE_PAGE = 2 << 20
_PAGE = 4096
#: Bytes that one call of the system touches.
_STEP = 4 << 20
#: ``MADV_POPULATE_WRITE`` of Linux 5.14; earlier systems refuse it.
_POPULATE_WRITE = 23
_MEMORY = Path("/proc/meminfo")
_NODES = Path("/sys/devices/system/node/online")


class _Region:
    """A region whose pages a thread touches from the beginning on, and that is given away from the beginning on."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._next = -self._address % HUGE_PAGE
        self._end = self._next + nbytes
        self._stop = threading.Event()
        self.map.madvise(mmap.MADV_HUGEPAGE, self._next, nbytes)
        self._thread = threading.Thread(target=self._touch, name="minifloat-memory", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> int | None:
        """Return the offset of the next bytes, which begin at a page; None if the region has no room for them."""
        start = self._next
        if start + nbytes > self._end:
            return None
        self._next = start + -(-nbytes // _PAGE) * _PAGE
        return start

    def close(self) -> None:
        """Give the pages that nobody has taken back to the system."""
        self._stop.set()
        self._thread.join()
        rest = -(-self._next // HUGE_PAGE) * HUGE_PAGE
        if rest < self._end:
            self.map.madvise(mmap.MADV_DONTNEED, rest, self._end - rest)

    def _touch(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)  # mmap's own method would stop all threads of Python meanwhile
        start = self._next
        while start < self._end and not self._stop.is_set():
            size = min(_STEP, self._end - start)
            if library.madvise(ctypes.c_void_p(self._address + start), ctypes.c_size_t(size), _POPULATE_WRITE):
                return
            start += size


_lock = threading.Lock()
_region: _Region | None = None


def prepare(nbytes: int) -> bool:
    """Begin to touch memory for weights that will be packed soon, and return whether this helps here.

    Args:
        nbytes: An upper bound of the bytes. What is left over goes back to the system by `finish`.
    """
    global _region
    nbytes = nbytes // HUGE_PAGE * HUGE_PAGE
    with _lock:
        if _region is not None or not nbytes or why_not(nbytes):
            return False
        _region = _Region(nbytes)
        return True


def take(nbytes: int) -> tuple[mmap.mmap, int] | None:
    """Return prepared memory, page-aligned: its map and offset; None if there is not enough."""
    with _lock:
        start = None if _region is None else _region.take(nbytes)
        return None if _region is None or start is None else (_region.map, start)


def finish() -> None:
    """End preparing, and give the memory that nobody has taken back to the system."""
    global _region
    with _lock:
        region, _region = _region, None
    if region is not None:
        region.close()


def why_not(nbytes: int) -> str:
    """Return why memory is not prepared here; empty if it is."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return "the system has no huge pages that a program can ask for"
    try:
        if _NODES.read_text().strip() != "0":
            return "the memory has several NUMA nodes"
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, ValueError, KeyError):
        return "the system does not say how much memory is free"
    return "" if 2 * nbytes <= free else "little memory is free"
