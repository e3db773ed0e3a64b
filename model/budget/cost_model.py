"""What a step costs on this device, measured.

A drafted node has a cost: the time by which it lengthens the forward pass. The cost depends on
the device, the model, the dtype and the threads, so it is measured on the loaded model, through the
same pass and the same read-out that decoding uses, once, and kept on disk.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

from ..engine.budget import CostCurve
from .device_speed import DeviceSpeed
from .switch import DraftingSwitch

# Cached tokens at which passes are measured.
CONTEXTS = (256, 1280)
BLOCK = 128  # contexts of one cost, in tokens
# CostCurve are made anew after so many steps.
REFRESH = 16
# What earlier steps said counts for less by this factor, each time.
FADING = 0.9
# Steps that the measured curve is worth against steps of a size.
STRENGTH = 8.0
# Largest factor between a step and what was expected of it.
OUTLIER = 1.5


@dataclass(slots=True)
class SizeCorrection:
    """How much longer steps take than was expected, as a factor.

    Attributes:
        total: sum of the factors seen.
        count: how many they are; both fade.
    """

    total: float = 0.0
    count: float = 0.0

    @property
    def factor(self) -> float:
        """The factor to expect."""
        return (STRENGTH + self.total) / (STRENGTH + self.count)

    def learn(self, factor: float) -> None:
        """Take note of a step."""
        self.total += min(max(factor, self.factor / OUTLIER), self.factor * OUTLIER)
        self.count += 1.0

    def fade(self) -> None:
        """Let what was seen count for less."""
        self.total *= FADING
        self.count *= FADING


@dataclass(slots=True)
class CostModel:
    """What a step of a target model costs: a measured curve, corrected by every step of decoding.

    The curve holds passes on a device that may have been busy; a step also drafts, keeps and learns,
    which costs more for more nodes. So steps are compared with the curve as they come.

    Attributes:
        sizes: nodes of a pass, root included, rising from 1.
        near: milliseconds of a pass at `CONTEXTS[0]` cached tokens, by size.
        far: the same at `CONTEXTS[1]`.
        pace: whether to draft at all.
    """

    sizes: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    switch: DraftingSwitch = field(default_factory=DraftingSwitch, repr=False, compare=False)
    _speed: DeviceSpeed = field(default_factory=DeviceSpeed, repr=False, compare=False)
    # Of steps of each size against what all take.
    _corrections: list[SizeCorrection] = field(default_factory=list, repr=False)
    _at: dict[int, CostCurve] = field(default_factory=dict, repr=False)
    _num_learned: int = 0

    def __post_init__(self) -> None:
        """Begin with the curve as it was measured."""
        self._corrections = [SizeCorrection() for _ in self.sizes]

    def fresh(self, drafting: CostModel | None = None) -> CostModel:
        """Return the same curve, with nothing learned: drafters differ in what their steps take.

        Args:
            drafting: costs of a model of which every drafted node takes a pass of one node.
        """
        if drafting is None:
            return type(self)(self.sizes, self.near, self.far)
        near, far = (
            tuple(cost + each * (size - 1) for cost, size in zip(curve, self.sizes, strict=True))
            for curve, each in ((self.near, drafting.near[0]), (self.far, drafting.far[0]))
        )
        return type(self)(self.sizes, near, far)

    def at(self, context: int) -> CostCurve:
        """Return the costs after `context` cached tokens: attention grows linearly with it."""
        block = context // BLOCK
        if block not in self._at:
            corrected = [
                cost * self._expected_factor(index) * correction.factor
                for index, (cost, correction) in enumerate(
                    zip(self._curve(block), self._corrections, strict=True)
                )
            ]
            # A smaller pass never costs more: where it was measured so, that was noise.
            lowest = list(accumulate(reversed(corrected), min))[::-1]
            self._at[block] = CostCurve(self.sizes, tuple(lowest))
        return self._at[block]

    def learn(self, num_nodes: int, num_tokens: int, context: int, nanoseconds: int) -> None:
        """Take note of a whole step with this many nodes after `context` cached tokens."""
        block = context // BLOCK
        plain = self._cost(0, block)
        if self.switch.is_resting:
            self._speed.learn(nanoseconds / 1e6 / plain, is_drafting=False)
            self.switch.rest()
            return
        index = bisect_left(self.sizes, num_nodes)
        if index == len(self.sizes):
            return  # larger than was measured
        cost, correction = self._cost(index, block), self._corrections[index]
        expected = cost * correction.factor
        surprise = self._speed.learn(nanoseconds / 1e6 / expected, is_drafting=index > 0)
        # A plain step that has searched in vain does not take less than one that has not.
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

    def _expected_factor(self, index: int) -> float:
        """Return how much longer a step of a size takes than its pass did on the curve, by what other
        sizes took.
        """
        return self._speed.plain_factor * (self._speed.drafting_factor if index else 1.0)

    def _curve(self, block: int) -> list[float]:
        """Return the milliseconds of a pass, by size, in the middle of a block of contexts."""
        return [self._cost(index, block) for index in range(len(self.sizes))]

    def _cost(self, index: int, block: int) -> float:
        """Return the milliseconds of a pass of the size with this index."""
        share = (block * BLOCK + BLOCK // 2 - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
        near = self.near[index]
        return near + max(share * (self.far[index] - near), -0.5 * near)
