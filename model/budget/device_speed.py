"""How long steps take against a measured curve, on a device whose speed wanders.

What a step takes has two sides. The device is slower or faster for a while, by a fifth and more on a
shared machine, and all kinds of steps with it; and a step that drafts takes longer than its pass was
measured, by a factor that hardly changes. Only the second matters for whether drafting pays, and it
shows where steps of both kinds come soon after one another. A Kalman filter (R. E. Kalman, A New
Approach to Linear Filtering and Prediction Problems, 1960) of these two logarithms tells them apart.
"""

from __future__ import annotations

import math

# Standard deviations, all of logarithms: what the two numbers may be at first,
FIRST_SPEED, FIRST_EXTRA = 0.5, 0.25
# how far they wander from one step to the next,
SPEED_STEP, EXTRA_STEP = 0.04, 0.001
# and by how much a single step is off.
NOISE = 0.08
# A step further off than so many of its deviations was disturbed.
FURTHEST = 2.0


class DeviceSpeed:
    """Two factors on the measured curve, followed from step to step."""

    def __init__(self) -> None:
        self._speed, self._extra = 0.0, 0.0  # logarithms
        # Their covariances.
        self._speeds, self._both, self._extras = FIRST_SPEED**2, 0.0, FIRST_EXTRA**2

    @property
    def plain_factor(self) -> float:
        """How much longer a plain step takes now than the curve says."""
        return math.exp(self._speed)

    @property
    def drafting_factor(self) -> float:
        """How much more than that a step takes that drafts."""
        return math.exp(self._extra)

    def learn(self, factor: float, is_drafting: bool) -> float:
        """Take note of a step that took `factor` times what the curve says.

        Returns:
            How much longer it took than was expected, as a factor.
        """
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
