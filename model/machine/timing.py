"""Timing of calls, the same everywhere: wall clock, with the device idle before and after asynchronous work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Clocks(NamedTuple):
    """Seconds of the wall clock, and those in which this thread ran on a processor."""

    wall: float
    ran: float


def clocks() -> Clocks:
    return Clocks(time.perf_counter(), time.thread_time())


def lost_share(since: Clocks, now: Clocks) -> float:
    """Return the share of the wall clock's time in which this thread, which never sleeps, could not run, 0 to 1."""
    wall = now.wall - since.wall
    return max(0.0, 1.0 - (now.ran - since.ran) / wall) if wall > 0 else 0.0


def relative_spread(times: Sequence[float]) -> float:
    """Return the interquartile range of two times or more, relative to their median."""
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / median


def seconds_of(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the seconds from a call until the device has finished its work.

    Args:
        call: the call to time.
        synchronize: waits for the device; called before and after `call`.
    """
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start
