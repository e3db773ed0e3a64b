"""The one limit of what tests wait for, so that none depends on the clock.

A test waits for the word of a process or a thread: a line, a file, an event, its end. This limit ends a wait for
what never comes. It decides nothing else, so it is far longer than any wait beside other work on a slow machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 1800.0  # seconds


def wait_for(is_true: Callable[[], bool], what: str = "it did not come true") -> None:
    """Wait until something is true, which another thread or process makes so."""
    latest = time.monotonic() + HANG
    while not is_true():
        assert time.monotonic() < latest, what
        time.sleep(0.001)
