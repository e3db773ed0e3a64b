"""Times of calls on a GPU: the host's apart from the device's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

# The first calls prepare libraries and capture graphs.
NUM_WARM = 3


class Times(NamedTuple):
    """Median milliseconds of a call.

    Attributes:
        host: until the call returned.
        device: between events before and after it; what launches take is in it where the device waits for them.
        total: until the device had finished.
    """

    host: float
    device: float
    total: float


def times_of(
    call: Callable[[], object],
    device: torch.device,
    num_timed: int,
    num_warm: int = NUM_WARM,
    prepare: Callable[[], object] = lambda: None,
) -> Times:
    """Time a call.

    Args:
        call: launches work, and does not wait for it.
        device: a GPU.
        num_timed: calls that are timed.
        num_warm: calls before them.
        prepare: called before each call, outside of its time.
    """
    for _ in range(num_warm):
        prepare()
        call()
    times = []
    for _ in range(num_timed):
        prepare()
        times.append(time_once(call, device))
    return Times(*map(statistics.median, zip(*times, strict=True)))


def time_once(call: Callable[[], object], device: torch.device) -> Times:
    """Time one call; the device is idle before it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    begin.record()
    call()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize(device)
    total = time.perf_counter() - start
    return Times(1e3 * host, begin.elapsed_time(end), 1e3 * total)
