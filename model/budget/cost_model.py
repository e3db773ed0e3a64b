"""The time of a step on this device, by its number of nodes: measured once, corrected while decoding.

A drafted node costs the time that it adds to the forward pass. That depends on device, model, dtype
and threads, so it is measured on the loaded model, with the pass and the read-out of decoding, and
kept on disk.

Two factors change a step's time. The device is slower or faster for a while, by a fifth and more on
a shared machine, for all kinds of steps. And a drafting step takes longer than its measured pass,
by a factor that hardly changes. Only the second decides whether drafting pays, and it shows when
steps of both kinds follow each other closely. A Kalman filter (R. E. Kalman, A New Approach to
Linear Filtering and Prediction Problems, 1960) on the two logarithms separates them.

Even a step whose drafter finds nothing pays for the search and for reading and learning candidates.
On a small model that is several percent of a step, which a text without repetition never earns back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ..engine.budget import CostCurve

# Standard deviations of the logarithms: of the two factors at first,
FIRST_SPEED, FIRST_EXTRA = 0.5, 0.25
# of their change from one step to the next,
SPEED_STEP, EXTRA_STEP = 0.04, 0.001
# and of the noise of a single step.
NOISE = 0.08
# A deviation is cut to this many standard deviations: such a step was disturbed.
FURTHEST = 2.0
# Loss that drafting may make before a pause, in root-only steps: at first, and after a pause.
FIRST_BALANCE, SECOND_BALANCE = 12.0, 3.0
# Root-only steps: at the start (to learn their cost), in a first pause, and at most in a repeated one, if drafting
# lost at most one step beyond the balance.
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 6, 32, 128
# Drafting steps between single root-only steps that measure the cost of drafting: at first and,
# doubling, at most. Only steps of both kinds close together show that cost.
FIRST_PERIOD, LONGEST_PERIOD = 4, 64
# Numbers of cached tokens at which passes are measured.
CONTEXTS = (256, 1280)
BLOCK = 128  # context lengths, in tokens, that share one cost curve
# Cost curves are recomputed after this many steps.
REFRESH = 16
# Earlier steps lose weight by this factor at each refresh.
FADING = 0.9
# The measured curve weighs as much as this many steps of a size.
STRENGTH = 8.0
# Largest factor between a step's time and the expected time.
OUTLIER = 1.5


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


class DraftingSwitch:
    """Decides whether the next step drafts, from the time that drafting has saved.

    The balance holds the savings of drafting, in root-only steps. When it is used up, drafting
    pauses; then it starts again with a smaller balance, and each further failure doubles the pause.
    A single step can lose far more than the balance, such as one in which heads work beside a
    small model; the pause is longer then, in proportion to what was lost beyond the balance.
    """

    def __init__(self) -> None:
        self._num_left = FIRST_PAUSE
        self._pause = PAUSE
        self._account = FIRST_BALANCE
        self._num_drafted = 0
        self._period = FIRST_PERIOD

    @property
    def is_paused(self) -> bool:
        """Whether the next step is root-only."""
        return self._num_left > 0

    def pause(self) -> None:
        """Count a root-only step."""
        self._num_left -= 1

    def learn(self, num_saved: float) -> None:
        """Count a drafting step that saved this many root-only steps; negative: lost."""
        self._account += num_saved
        self._num_drafted += 1
        if self._account >= FIRST_BALANCE:
            self._account, self._pause = FIRST_BALANCE, PAUSE
        elif self._account < 0.0:
            self._num_left = round(self._pause * max(1.0, -self._account))
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._account, self._num_drafted = SECOND_BALANCE, 0
        if self._num_drafted == self._period:
            self._num_left, self._num_drafted = 1, 0
            self._period = min(2 * self._period, LONGEST_PERIOD)


@dataclass(slots=True)
class SizeCorrection:
    """The time of steps of one size relative to the expected time: a sum of factors and their number, fading."""

    total: float = 0.0
    count: float = 0.0

    @property
    def factor(self) -> float:
        return (STRENGTH + self.total) / (STRENGTH + self.count)

    def learn(self, factor: float) -> None:
        self.total += min(max(factor, self.factor / OUTLIER), self.factor * OUTLIER)
        self.count += 1.0

    def fade(self) -> None:
        self.total *= FADING
        self.count *= FADING


@dataclass(slots=True)
class CostModel:
    """Costs of a step of a target model: a measured curve, corrected by every step of decoding.

    The curve is of passes, measured on a device that may have been busy; a step also drafts, keeps
    and learns, which costs more for more nodes. So each step is compared with the curve.
    """

    sizes: tuple[int, ...]  # nodes of a pass, root included, rising from 1
    near: tuple[float, ...]  # milliseconds of a pass at `CONTEXTS[0]` cached tokens, by size
    far: tuple[float, ...]  # the same at `CONTEXTS[1]`
    # Whether to draft at all.
    switch: DraftingSwitch = field(default_factory=DraftingSwitch, repr=False, compare=False)
    _speed: DeviceSpeed = field(default_factory=DeviceSpeed, repr=False, compare=False)
    # By size: the time of its steps relative to steps of all sizes.
    _corrections: list[SizeCorrection] = field(default_factory=list, repr=False)
    _at: dict[int, CostCurve] = field(default_factory=dict, repr=False)
    _num_learned: int = 0

    def __post_init__(self) -> None:
        self._corrections = [SizeCorrection() for _ in self.sizes]

    @property
    def has_drafted(self) -> bool:
        """Whether the first pause is over, and a step has drafted."""
        return self._num_learned > 0

    def fresh(self, drafting: CostModel | None = None) -> CostModel:
        """Return the same curve without anything learned, for another drafter, whose steps differ.

        A draft model runs a pass of one node, by its costs `drafting`, for every drafted node.
        """
        if drafting is None:
            return type(self)(self.sizes, self.near, self.far)
        near, far = (
            tuple(cost + each * (size - 1) for cost, size in zip(curve, self.sizes, strict=True))
            for curve, each in ((self.near, drafting.near[0]), (self.far, drafting.far[0]))
        )
        return type(self)(self.sizes, near, far)

    def of_sequences(self, num_sequences: int, for_sequence: tuple[float, float]) -> CostModel:
        """Return the costs of a step of several sequences by 1 and the drafted nodes of all, with nothing learned.

        A further sequence adds the milliseconds `for_sequence`, near and far, beside those of its root.
        """
        larger = [size for size in self.sizes if size > num_sequences]
        near, far = (
            tuple(
                np.interp((num_sequences, *larger), self.sizes, curve)
                + (num_sequences - 1) * for_each
            )
            for curve, for_each in zip((self.near, self.far), for_sequence, strict=True)
        )
        sizes = (1, *(size - num_sequences + 1 for size in larger))
        return type(self)(sizes, near, far)

    def share_learned(self, other: CostModel) -> None:
        """Share what another has learned of the device, and whether drafting pays."""
        self.switch, self._speed = other.switch, other._speed

    def at(self, context: int) -> CostCurve:
        """Return the costs after `context` cached tokens: attention grows linearly with it."""
        block = context // BLOCK
        if block not in self._at:
            plain, drafting = self._speed.plain_factor, self._speed.drafting_factor
            corrected = [
                self._cost(index, block) * plain * (drafting if index else 1.0) * correction.factor
                for index, correction in enumerate(self._corrections)
            ]
            # A smaller pass never costs more: if it was measured so, that was noise.
            lowest = list(accumulate(reversed(corrected), min))[::-1]
            self._at[block] = CostCurve(self.sizes, tuple(lowest))
        return self._at[block]

    def learn(self, num_nodes: int, num_tokens: float, context: int, nanoseconds: int) -> None:
        """Learn from a whole step with this many nodes after `context` cached tokens."""
        block = context // BLOCK
        plain = self._cost(0, block)
        if self.switch.is_paused:
            self._speed.learn(nanoseconds / 1e6 / plain, is_drafting=False)
            self.switch.pause()
            return
        index = bisect_left(self.sizes, num_nodes)
        if index == len(self.sizes):
            return  # larger than was measured
        cost, correction = self._cost(index, block), self._corrections[index]
        expected = cost * correction.factor
        surprise = self._speed.learn(nanoseconds / 1e6 / expected, is_drafting=index > 0)
        # A root-only step after a search in vain takes no less time than one without a search.
        factor = (
            max(1.0, correction.factor)
            if not index
            else correction.factor * self._speed.drafting_factor
        )
        self.switch.learn(num_tokens - cost / plain * factor)
        correction.learn(surprise * correction.factor)
        self._num_learned += 1
        if self._num_learned % REFRESH == 0:
            self._at.clear()
            for each in self._corrections:
                each.fade()

    def _cost(self, index: int, block: int) -> float:
        """Return the milliseconds of a pass of a size, in the middle of a block of context lengths."""
        share = (block * BLOCK + BLOCK // 2 - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
        near = self.near[index]
        return near + max(share * (self.far[index] - near), -0.5 * near)
