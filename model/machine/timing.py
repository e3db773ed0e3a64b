"""Time of calls, measured one way everywhere: on the wall clock, with the device's queue empty at both
ends where a call leaves work behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


def seconds_of(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Return the seconds from a call until the device has done what it asked for.

    Args:
        call: what is timed.
        synchronize: waits for the device; before the call for what others left to it.
    """
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def interleaved_medians(
    calls: Sequence[Callable[[], object]],
    num_rounds: int,
    enough_seconds: float,
    least_rounds: int = 1,
) -> list[float]:
    """Return the median seconds of each call; they take turns, so that a slow moment hits all of them.

    For calls on the CPU: nothing is waited for.

    Args:
        calls: what is timed.
        num_rounds: how often each is called, at most.
        enough_seconds: after a round in which the last call has taken more than this in all, no other
            begins.
        least_rounds: how often each is called all the same.
    """
    times: list[list[float]] = [[] for _ in calls]
    for done in range(1, num_rounds + 1):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        if done >= least_rounds and sum(times[-1]) > enough_seconds:
            break
    return [statistics.median(found) for found in times]
