"""Connections within limits: no more than there is room for, and none that is silent, or not read, for long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def limited(most: int, head_seconds: float, longest_seconds: float) -> type[H11Protocol]:
    """Return a protocol for uvicorn, of which `most` connections are open at a time.

    For a further one the connection that has been without a request for the longest time is closed; if all have
    one, it is closed itself. A connection has `head_seconds` to send the head of a request, and `longest_seconds`
    until its answer has been taken.
    """
    # Without a request, in the order in which they became so.
    idle: dict[LimitedProtocol, None] = {}

    class LimitedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            idle[self] = None
            self._wait(head_seconds)
            if len(self.connections) > most:
                oldest = next(iter(idle))
                del idle[oldest]  # it is lost a little later
                oldest.transport.close()

        def data_received(self, data: bytes) -> None:
            was_idle = self in idle
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                idle.pop(self, None)
                if was_idle:
                    self._wait(longest_seconds)
            elif self._timer is None:  # a part of the next head
                self._wait(head_seconds)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._stop_waiting()  # uvicorn closes what is silent between requests
            idle.setdefault(self)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            idle.pop(self, None)
            self._stop_waiting()

        def _wait(self, seconds: float) -> None:
            self._stop_waiting()
            self._timer = self.loop.call_later(seconds, self.transport.abort)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return LimitedProtocol
