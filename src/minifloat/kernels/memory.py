"""Memory that a process may still take, on the host and on GPUs, and memory that is touched before it is needed.

A control group counts the page cache of its files as use. The kernel gives it up before it refuses memory, so it is
available here, as in Linux's MemAvailable.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from minifloat.kernels.processors import CGROUPS, MEMBERSHIP, control_groups

if TYPE_CHECKING:
    import torch

#: Files of limits and of use, version 2 and version 1. Beyond ``memory.high`` Linux slows a group down.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USES = ("memory.current", "memory.usage_in_bytes")
#: Entries of ``memory.stat`` that the kernel takes back; those with "total" count the groups below too, in version 1.
_CACHES = ("active_file", "inactive_file")
_TOTALS = tuple(f"total_{name}" for name in _CACHES)


def available_memory(device: str | torch.device = "cpu") -> int:
    """Return the bytes that this process can still take on a device: on the host, the least of system and groups."""
    if not str(device).startswith("cuda"):
        free = (limit - use for limit, use in _groups())
        return max(0, min([int(psutil.virtual_memory().available), *free]))
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def memory_limit() -> int | None:
    """Return the least bytes that a control group allows this process; None where they allow all of the machine's."""
    least = min((limit for limit, _ in _groups()), default=None)
    return None if least is None or least >= psutil.virtual_memory().total else least


def total_memory() -> int:
    """Return the bytes of the machine, or those that control groups allow if that is less."""
    limit = memory_limit()
    return int(psutil.virtual_memory().total) if limit is None else limit


def _groups(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each group with a limit: the process's own, and those above."""
    for group in control_groups("memory", membership, cgroups):
        limits = [number for name in _LIMITS if (number := _number(group / name)) is not None]
        if limits:
            use = next((number for name in _USES if (number := _number(group / name)) is not None), 0)
            yield min(limits), max(0, use - _page_cache(group / "memory.stat"))


def _number(file: Path) -> int | None:
    """Return the number in a file; None without the file, and for "max"."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _page_cache(file: Path) -> int:
    """Return the bytes of files that a group holds in memory."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    entries = {name: int(number) for name, _, number in (line.partition(" ") for line in lines) if number.isdecimal()}
    names = _TOTALS if _TOTALS[0] in entries else _CACHES
    return sum(entries.get(name, 0) for name in names)


#: Bytes that are touched at a time.
_PIECE = 32 << 20


class Touched:
    """New memory of the host in huge pages, which a thread touches from its beginning on, ahead of those who take it.

    Linux clears each page that is touched first, and a virtual machine may have to get it from its host: 0.2 to 2
    seconds per GB, in which Python can import modules.
    """

    def __init__(self, nbytes: int) -> None:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._region.madvise(mmap.MADV_HUGEPAGE)
        self._taken = self._touched = 0
        self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._touch, name="minifloat-memory", daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._region))
        while self._touched < len(self._region) and not self._ended:
            piece = min(_PIECE, len(self._region) - self._touched)
            ctypes.memset(address + self._touched, 0, piece)
            self._touched += piece

    def take(self, nbytes: int) -> tuple[mmap.mmap, int] | None:
        """Take memory: the mapping and the offset in it, a multiple of a page; None if not enough of it is touched."""
        with self._lock:
            begin, end = self._taken, self._taken + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            if self._ended or end > self._touched:
                return None
            self._taken = end
            return self._region, begin

    def end(self) -> None:
        """Touch no more, and give back to the system what nobody has taken."""
        with self._lock:
            self._ended = True
        self._thread.join()
        if self._taken < self._touched and hasattr(mmap, "MADV_DONTNEED"):
            self._region.madvise(mmap.MADV_DONTNEED, self._taken)


_touched: Touched | None = None


def take_touched(nbytes: int) -> tuple[mmap.mmap, int] | None:
    """Take memory within `touching`, as `Touched.take`; None outside of it."""
    return None if _touched is None else _touched.take(nbytes)


def end_touching() -> None:
    """Give back what `touching` has touched and nobody has taken."""
    global _touched
    touched, _touched = _touched, None
    if touched is not None:
        touched.end()


@contextlib.contextmanager
def touching(nbytes: int) -> Iterator[None]:
    """Touch memory for weights on another thread within the context, at most half of what is available."""
    global _touched
    nbytes = min(nbytes, available_memory() // 2)
    if nbytes > 0:
        _touched = Touched(nbytes)
    try:
        yield
    finally:
        end_touching()
