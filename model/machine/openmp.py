"""OpenMP's threads, which a thread of Python gives back when it has computed.

Each thread that computes in parallel gets a pool of further threads, for as long as it lives. GCC's runtime, which
torch brings on Linux, counts the threads of all pools: if they are more than the processors, they sleep between
parallel regions instead of waiting actively. A pass has over a hundred regions. So a program that loads a model in
one thread and decodes in another was slower with two threads than with one (SmolLM2-135M Q4_1, two cores: 16 to
20 ms a pass; 8 to 10 ms in the thread that loaded it).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

# `omp_pause_soft` (OpenMP 5.0, section 3.2.44): what the runtime holds may be freed, and settings stay.
SOFT = 1


def give_back_threads() -> None:
    """End the pool of this thread, if it has one; the next parallel region makes another.

    Both together take some 50 us for each of its threads.
    """
    if pause := _pause():
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """Return the runtime's function; None where torch has another runtime, or an old one."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    try:
        # Of torch's own runtime: other packages bring others.
        pause: Callable[[int], int] = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return pause
