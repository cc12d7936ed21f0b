"""Memory that goes back to the system when it is freed, while a model is being loaded.

Weights are read, packed and freed one after the other. glibc takes large pieces from the system and gives them back,
until it has seen one freed: from then on it keeps pieces of that size (up to 32 MiB, which most weights are) in heaps
that only shrink at their ends. A BF16 model of 2.2 GB then held 4.2 GB, its weights and the holes where they were read.

Left out: other C libraries, whose allocators have no such settings or need none.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

#: Source: malloc.h of glibc, and what its own adjustment ends at (DEFAULT_MMAP_THRESHOLD_MAX and twice that).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
#: From here on a piece is mapped by itself while a model is loaded.
_PIECE = 256 << 10


@contextlib.contextmanager
def returned_when_freed() -> Iterator[None]:
    """Inside, large pieces are given back as soon as they are freed; afterwards they are kept for reuse again."""
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
