"""Time of steps relative to a measured curve, on a device whose speed varies.

Two factors change a step's time. The device is slower or faster for a while, by a fifth and more on
a shared machine, for all kinds of steps. And a drafting step takes longer than its measured pass,
by a factor that hardly changes. Only the second decides whether drafting pays, and it shows when
steps of both kinds follow each other closely. A Kalman filter (R. E. Kalman, A New Approach to
Linear Filtering and Prediction Problems, 1960) on the two logarithms separates them.
"""

from __future__ import annotations

import math

# Standard deviations of the logarithms: of the two factors at first,
FIRST_SPEED, FIRST_EXTRA = 0.5, 0.25
# of their change from one step to the next,
SPEED_STEP, EXTRA_STEP = 0.04, 0.001
# and of the noise of a single step.
NOISE = 0.08
# A deviation is cut to this many standard deviations: such a step was disturbed.
FURTHEST = 2.0


class DeviceSpeed:
    """Two factors on the measured curve, updated with every step."""

    def __init__(self) -> None:
        self._speed, self._extra = 0.0, 0.0  # logarithms
        # Their covariances.
        self._speeds, self._both, self._extras = FIRST_SPEED**2, 0.0, FIRST_EXTRA**2

    @property
    def plain_factor(self) -> float:
        """Time of a root-only step now, relative to the curve."""
        return math.exp(self._speed)

    @property
    def drafting_factor(self) -> float:
        """Further factor on the time of a drafting step, on top of `plain_factor`."""
        return math.exp(self._extra)

    def learn(self, factor: float, is_drafting: bool) -> float:
        """Learn from a step that took `factor` times the curve's time; return its time relative to the expected."""
        self._speeds += SPEED_STEP**2
        self._extras += EXTRA_STEP**2
        shows = float(is_drafting)
        with_speed = self._speeds + shows * self._both
        with_extra = self._both + shows * self._extras
        variance = with_speed + shows * with_extra + NOISE**2
        surprise = math.log(factor) - self._speed - shows * self._extra
        furthest = FURTHEST * math.sqrt(variance)
        taken = min(max(surprise, -furthest), furthest)
        self._speed += with_speed / variance * taken
        self._extra += with_extra / variance * taken
        self._speeds -= with_speed**2 / variance
        self._both -= with_speed * with_extra / variance
        self._extras -= with_extra**2 / variance
        return math.exp(taken)
