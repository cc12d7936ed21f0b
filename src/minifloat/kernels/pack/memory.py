"""Memory for packed weights: pages of 2 MB if the system gives them, touched first by the threads that read them.

A product reads every byte of a weight once, so a page table walk per 4 KB costs more than a tenth of the memory's
bandwidth. Each allocation maps new memory: pages that another thread has touched before would stay on that thread's
NUMA node, and would stay small.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from minifloat.kernels.pack.layout import VECTOR_BYTES

HUGE_PAGE = 2 << 20


def allocate(nbytes: int) -> Tensor:
    """Allocate uint8 ``[nbytes]``, undefined, 64-byte aligned; 2 MB or more are in 2 MB pages.

    The tensor is a view of a larger storage. Its clones and copies, pickled ones too, are only 64-byte aligned and in
    pages of any size; kernels run on them too.
    """
    if nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(region, dtype=torch.uint8)
    offset = -storage.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE, offset, nbytes // HUGE_PAGE * HUGE_PAGE)
    return storage[offset : offset + nbytes]


def is_aligned(data: Tensor) -> bool:
    """Return whether a tensor has the alignment that kernels require."""
    return data.data_ptr() % VECTOR_BYTES == 0
