"""Timing of calls, with a clock that the calls themselves advance.

Run: pytest tests/model/machine/test_timing.py
"""

from __future__ import annotations

from functools import partial

import pytest

from model.machine import timing
from model.machine.timing import interleaved_medians, seconds_of


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


def test_calls_take_turns_until_the_last_has_had_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls = [partial(clock.take, 1.0), partial(clock.take, 2.0)]
    assert interleaved_medians(calls, num_rounds=9, enough_seconds=5.0) == [1.0, 2.0]
    assert clock.calls == [1.0, 2.0] * 3


@pytest.mark.parametrize(("num_rounds", "least_rounds", "done"), [(9, 1, 1), (9, 2, 2), (1, 2, 1)])
def test_rounds_are_bounded(
    num_rounds: int, least_rounds: int, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    interleaved_medians([partial(clock.take, 1.0)], num_rounds, 0.0, least_rounds)
    assert len(clock.calls) == done
