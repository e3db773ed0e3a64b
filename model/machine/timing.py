"""How long calls take, the same everywhere, and how far a loop is.

Times are of the wall clock, with the device idle before and after asynchronous work. Progress bars move on a
terminal; in a log file they are a line now and then.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TextIO

from tqdm import tqdm


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
    """Return the seconds from a call until the device, for which `synchronize` waits, has finished its work."""
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


# Seconds between two lines in a log file.
LOG_INTERVAL = 30.0
LOG_FORMAT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class _Lines:
    """A stream that writes a bar's states as lines, without carriage returns and empty ones."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            self._stream.write(f"{text}\n")

    def flush(self) -> None:
        self._stream.flush()


def progress(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm[Any]:
    """Return a tqdm on standard error; `set_postfix_str` needs `refresh=False` before `update`."""
    if not sys.stderr.isatty():
        options |= {
            "file": _Lines(sys.stderr),
            "mininterval": LOG_INTERVAL,
            "maxinterval": LOG_INTERVAL,
            "miniters": 1,
            "bar_format": "{desc}: " * ("desc" in options) + LOG_FORMAT,
        }
    return tqdm(iterable, **options)
