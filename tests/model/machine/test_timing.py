"""Timing of calls, with a clock that the calls themselves advance.

Run: pytest tests/model/machine/test_timing.py
"""

from __future__ import annotations

from functools import partial

import pytest

from model.machine import timing
from model.machine.timing import Clocks, clocks, lost_share, relative_spread, seconds_of


class Clock:
    """A clock that moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.ran = 0.0
        self.calls: list[float] = []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(timing.time, "thread_time", lambda: self.ran)

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


def test_time_in_which_the_thread_could_not_run_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lost_share(Clocks(1.0, 5.0), Clocks(3.0, 6.5)) == 0.25
    assert lost_share(Clocks(1.0, 5.0), Clocks(3.0, 7.5)) == 0.0, "clocks of unlike grain"
    assert lost_share(Clocks(1.0, 5.0), Clocks(1.0, 5.0)) == 0.0
    clock = Clock(monkeypatch)
    since = clocks()
    clock.take(4.0)
    clock.ran += 1.0
    assert lost_share(since, clocks()) == 0.75


def test_spread_is_relative_to_the_median() -> None:
    assert relative_spread([2.0] * 5) == 0.0
    assert relative_spread([10.0, 20.0, 20.0, 20.0, 1000.0]) == 0.0, "one disturbed moment"
    assert relative_spread([10.0, 15.0, 20.0, 25.0, 30.0]) == 0.5
    assert relative_spread([9.0, 11.0]) == 0.1
