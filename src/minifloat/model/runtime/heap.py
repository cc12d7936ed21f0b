"""Returns freed memory to the system at once while a model is being loaded.

Weights are read, packed and freed one after the other. glibc maps a large piece of memory from the system and unmaps it
when it is freed; but after the first such piece it keeps pieces of that size (up to 32 MiB, as most weights) in heaps
that only shrink at their ends. A BF16 model of 2.2 GB then held 4.2 GB: its weights and the holes where they were read.

Left out: other C libraries, whose allocators have no such settings or need none.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: Source: malloc.h of glibc; its own adjustment of the thresholds ends at DEFAULT_MMAP_THRESHOLD_MAX and twice that.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
#: Pieces of this many bytes and more are mapped one by one while a model is loaded.
_PIECE = 256 << 10


@contextlib.contextmanager
def returned_when_freed() -> Iterator[None]:
    """Within the context, return large pieces to the system when they are freed; afterwards glibc reuses them again."""
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
