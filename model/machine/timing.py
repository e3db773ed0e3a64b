"""Timing of calls, the same everywhere: wall clock, with the device idle before and after asynchronous work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence


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


def interleaved_medians(
    calls: Sequence[Callable[[], object]],
    num_rounds: int,
    enough_seconds: float,
    least_rounds: int = 1,
) -> list[float]:
    """Return the median seconds of each call on the CPU; they take turns, so a slow moment hits all of them.

    The device is not waited for.

    Args:
        calls: the calls to time.
        num_rounds: most rounds; each round runs every call once.
        enough_seconds: no new round begins once the last call has taken more than this in total.
        least_rounds: fewest rounds, whatever they take.
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
