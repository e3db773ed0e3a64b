"""Timing of calls, the same everywhere: wall clock, with the device idle before and after asynchronous work."""

from __future__ import annotations

import time
from collections.abc import Callable


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
