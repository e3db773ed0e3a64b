"""Calls that are captured as CUDA graphs and replayed: their kernels run again without any Python.

A captured call reads and writes memory at fixed addresses, so it takes no arguments: what changes
from call to call is copied to these addresses before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..machine.hardware import Captured, captured


class CaptureFailed(RuntimeError):
    """A call does something that a CUDA graph cannot hold, such as waiting for the device."""

    @classmethod
    def of(cls, error: Exception) -> CaptureFailed:
        """Return the failure that an error is the cause of, in one line."""
        lines = str(error).splitlines() or [""]
        return cls(f"{type(error).__name__}: {lines[0]}")


class CapturedCalls:
    """Calls by key: the first of a key runs as it is, the second is captured, and later ones are replayed.

    A capture executes nothing, so that every call is executed exactly once. The first one is there
    for libraries that prepare themselves at their first use, which cannot be captured.

    All graphs share their memory: an output must be used before the next call.

    A call that cannot be captured runs as it is every time.

    Args:
        device: a GPU.

    Attributes:
        failure: why the last call that could not be captured could not; empty if there was none.
        num_prepared: calls that were no replay, which take far longer.
        seconds: spent on these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._captured: dict[Hashable, Captured | None] = {}
        self._uncapturable: set[Hashable] = set()
        self.failure = ""
        self.num_prepared = 0
        self.seconds = 0.0

    def __len__(self) -> int:
        """Return the number of graphs."""
        return sum(known is not None for known in self._captured.values())

    def run(self, key: Hashable, call: Callable[[], Any]) -> Any:
        """Return the output of a call, of which the key tells all that a replay does not read from memory."""
        known = self._captured.get(key)
        if known is None:
            begin = time.perf_counter()
            self.num_prepared += 1
            output, known = self._prepare(key, call)
            self.seconds += time.perf_counter() - begin
            if known is None:
                return output
        known.graph.replay()
        return known.output

    def _prepare(self, key: Hashable, call: Callable[[], Any]) -> tuple[Any, Captured | None]:
        """Return the output of a call that runs as it is; or None, and its graph."""
        is_first = key not in self._captured
        self._captured[key] = None
        if is_first or key in self._uncapturable:
            return call(), None
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._captured[key] = found = captured(call, self._device, self._pool)
        except RuntimeError as error:
            self.failure = str(CaptureFailed.of(error))
            self._uncapturable.add(key)
            return call(), None
        return None, found

    def forget(self, is_old: Callable[[Any], bool]) -> None:
        """Forget the calls with such keys."""
        self._captured = {key: value for key, value in self._captured.items() if not is_old(key)}
