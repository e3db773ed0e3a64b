"""Timing of calls, with a clock that the calls themselves advance.

Run: pytest tests/model/machine/test_timing.py
"""

from __future__ import annotations

from functools import partial

import pytest

from model.machine import timing
from model.machine.timing import seconds_of


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[float] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def take(self, seconds: float) -> None:
        """Let time pass."""
        self.calls.append(seconds)
        self.now += seconds


def test_a_call_is_timed_from_an_idle_device_to_an_idle_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    waits = [5.0, 3.0]  # for what others left, and for the call's own work
    assert seconds_of(partial(clock.take, 1.0), lambda: clock.take(waits.pop(0))) == 4.0
