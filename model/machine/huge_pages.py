"""Memory of weights in pages of 2 MiB, where Linux can do so.

A pass reads every weight once, so the processor looks up a page for every 4 KiB of them. On a virtual machine
that costs up to two fifths of a memory's speed: one thread of an AMD EPYC (Firecracker, Linux 6.18) reads 16 GB/s
from small pages and 26 GB/s from huge ones. The tensors stay where they are, and so does every number.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from threading import Thread

import torch

PAGE = 2**21
# Of <linux/mman.h>, since Linux 6.1: make huge pages of what lies there, now.
COLLAPSE = 25


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> Thread | None:
    """Put tensors' memory into huge pages, in a thread that ends by itself; return it, None without any.

    Nothing is copied into other tensors: texts may be decoded meanwhile. What cannot be a huge page stays as it is.
    """
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    if sys.platform != "linux" or not storages:
        return None
    # The thread keeps the storages, whose memory must not be freed meanwhile.
    thread = Thread(target=_collapse, args=(storages,), daemon=True, name="huge-pages")
    thread.start()
    return thread


def are_possible() -> bool:
    """Whether this system makes huge pages of memory that is in use; tried on one."""
    tried = torch.ones(3 * PAGE, dtype=torch.uint8)
    return sys.platform == "linux" and _collapse([tried.untyped_storage()]) > 0


def _collapse(storages: Iterable[torch.UntypedStorage]) -> int:
    """Make huge pages of the storages' memory; return how many there are."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    places = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
    pages = {
        page for begin, size in places for page in range(begin // PAGE * PAGE, begin + size, PAGE)
    }
    return sum(madvise(page, PAGE, COLLAPSE) == 0 for page in sorted(pages))
