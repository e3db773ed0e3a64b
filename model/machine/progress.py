"""Progress bars: on a terminal one that moves, in a log file a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm

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
