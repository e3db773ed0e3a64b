"""What a step costs on this device, measured.

A drafted node has a price: the time by which it lengthens the forward pass. The price depends on
the device, the model, the dtype and the threads, so it is measured on the loaded model, through the
same pass and the same read-out that decoding uses, once, and kept on disk.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ..engine.budget import Prices
from ..engine.tree import DraftTree
from ..engine.verification import read_out
from ..machine.measurements import machine_key, read_measured, write_measured
from ..machine.timing import seconds_of
from .device_speed import Tempo
from .switch import Pace

if TYPE_CHECKING:
    from ..engine.cache import TreeCache
    from ..engine.target import TargetModel

# What is timed: (which context, nodes with the root). What a slow model has no time for comes last.
# Matrix kernels work in blocks of eight rows, so that costs jump after each.
LARGEST = 64
CONTEXTS = (256, 1280)
BLOCK = 128  # contexts of one price, in tokens
PLAN = (
    *((0, 1), (0, 8), (0, 16), (0, 32), (1, 1), (0, LARGEST), (1, LARGEST)),
    *((0, 4), (0, 2), (0, 24), (0, 48), (0, 12), (0, 3), (0, 6)),
)
NUM_ESSENTIAL = 2
# When measuring stops: early enough for the passes under way to end within three seconds.
SECONDS = 2.8
# Passes of one size in a row, of which the fastest counts, where one takes fewer milliseconds than `SHORT`:
# steps come in a row, and a single pass of a small model after a larger one finds other things in the processor's
# caches.
IN_A_ROW, SHORT = 10, 20.0
MAX_ROUNDS = 9
# Prices are made anew after so many steps.
REFRESH = 16
# What earlier steps said counts for less by this factor, each time.
FADING = 0.9
# Steps that the measured curve is worth against steps of a size.
STRENGTH = 8.0
# Largest factor between a step and what was expected of it.
OUTLIER = 1.5


@dataclass(slots=True)
class Drift:
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
class StepCosts:
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
    pace: Pace = field(default_factory=Pace, repr=False, compare=False)
    _tempo: Tempo = field(default_factory=Tempo, repr=False, compare=False)
    # Of steps of each size against what all take.
    _drifts: list[Drift] = field(default_factory=list, repr=False)
    _at: dict[int, Prices] = field(default_factory=dict, repr=False)
    _num_learned: int = 0

    def __post_init__(self) -> None:
        """Begin with the curve as it was measured."""
        self._drifts = [Drift() for _ in self.sizes]

    def fresh(self, drafting: StepCosts | None = None) -> StepCosts:
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

    def at(self, context: int) -> Prices:
        """Return the prices after `context` cached tokens: attention grows linearly with it."""
        block = context // BLOCK
        if block not in self._at:
            corrected = [
                cost * self._expected_factor(index) * drift.factor
                for index, (cost, drift) in enumerate(
                    zip(self._curve(block), self._drifts, strict=True)
                )
            ]
            # A smaller pass never costs more: where it was measured so, that was noise.
            lowest = list(accumulate(reversed(corrected), min))[::-1]
            self._at[block] = Prices(self.sizes, tuple(lowest))
        return self._at[block]

    def learn(self, num_nodes: int, num_tokens: int, context: int, nanoseconds: int) -> None:
        """Take note of a whole step with this many nodes after `context` cached tokens."""
        block = context // BLOCK
        plain = self._cost(0, block)
        if self.pace.is_resting:
            self._tempo.learn(nanoseconds / 1e6 / plain, is_drafting=False)
            self.pace.rest()
            return
        index = bisect_left(self.sizes, num_nodes)
        if index == len(self.sizes):
            return  # larger than was measured
        cost, drift = self._cost(index, block), self._drifts[index]
        expected = cost * drift.factor
        surprise = self._tempo.learn(nanoseconds / 1e6 / expected, is_drafting=index > 0)
        # A plain step that has searched in vain does not take less than one that has not.
        factor = max(1.0, drift.factor) if not index else drift.factor * self._tempo.drafting_factor
        self.pace.learn(num_tokens - cost / plain * factor)
        drift.learn(surprise * drift.factor)
        self._num_learned += 1
        if self._num_learned % REFRESH == 0:
            self._at.clear()
            for each in self._drifts:
                each.fade()

    def _expected_factor(self, index: int) -> float:
        """Return how much longer a step of a size takes than its pass did on the curve, by what other
        sizes took.
        """
        return self._tempo.plain_factor * (self._tempo.drafting_factor if index else 1.0)

    def _curve(self, block: int) -> list[float]:
        """Return the milliseconds of a pass, by size, in the middle of a block of contexts."""
        return [self._cost(index, block) for index in range(len(self.sizes))]

    def _cost(self, index: int, block: int) -> float:
        """Return the milliseconds of a pass of the size with this index."""
        share = (block * BLOCK + BLOCK // 2 - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
        near = self.near[index]
        return near + max(share * (self.far[index] - near), -0.5 * near)


@torch.inference_mode()
def measure(target: TargetModel) -> StepCosts:
    """Time passes of several sizes on the loaded model, in about `SECONDS`.

    Where the model is too slow for all sizes, fewer are measured, and trees are chosen among these:
    at least one and eight nodes, however long they take.
    """
    longest = target.context_limit(1) or CONTEXTS[1] + LARGEST
    contexts = [max(0, min(context, longest - LARGEST)) for context in CONTEXTS]
    # Where drafts are padded, others cost what these do; no chain is longer than the context.
    plan = [
        (place, size)
        for place, size in PLAN
        if target.padded_size(size) == size and size <= longest
    ]
    target.warm_up(contexts[1], {size for _, size in plan})
    cache = target.new_cache(contexts[1] + LARGEST)
    trees = {size: draft_of(target, size) for _, size in plan}
    time_pass(target, cache, trees[1], contexts[0])  # the first pass pays for initialisation
    times: dict[tuple[int, int], list[float]] = {}
    deadline = time.perf_counter() + SECONDS
    for _ in range(MAX_ROUNDS):
        for place, size in list(times) or plan:
            if time.perf_counter() > deadline and len(times) >= NUM_ESSENTIAL:
                break
            cost = _time_in_a_row(target, cache, trees[size], contexts[place])
            times.setdefault((place, size), []).append(cost)
    medians = {point: statistics.median(values) for point, values in times.items()}
    sizes = tuple(sorted(size for place, size in medians if place == 0))
    near = tuple(medians[0, size] for size in sizes)
    # What the longer context costs one node and the largest tree; between them, by the nodes.
    growth = {size: medians[1, size] - medians[0, size] for place, size in medians if place == 1}
    for_one = max(growth.get(1, 0.0), 0.0)
    for_each = max(growth.get(LARGEST, for_one) - for_one, 0.0) / (LARGEST - 1)
    # A model whose context is shorter than the longer one was measured on a part of the way there.
    way = contexts[1] - contexts[0]
    stretch = (CONTEXTS[1] - CONTEXTS[0]) / way if way else 0.0
    far = tuple(
        cost + stretch * (for_one + for_each * (size - 1))
        for cost, size in zip(near, sizes, strict=True)
    )
    return StepCosts(sizes, near, far)


def draft_of(target: TargetModel, num_nodes: int) -> DraftTree:
    """Return a draft of so many nodes to time passes with: a star, which has a tree's mask at any size,
    where the model verifies trees.
    """
    make = DraftTree.chain if target.chain_only else DraftTree.star
    return make([1] * num_nodes, target.device)


def has_room(target: TargetModel, num_nodes: int, context: int) -> bool:
    """Whether a draft of so many nodes (`draft_of`) ends within the model's context, after so many tokens of
    it: a star is one node deep.
    """
    limit = target.context_limit(context + 1)
    return not target.chain_only or limit is None or context + num_nodes <= limit


def time_pass(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of one forward pass and its read-out after `context` cached rows.

    The rows are whatever the buffers hold: time does not depend on them.
    """
    cache.keep(context, ())

    def verify() -> None:
        read_out(tree, target.forward(tree, cache), num_candidates=8)

    return 1e3 * seconds_of(verify, target.synchronize)


def _time_in_a_row(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of a pass, as `time_pass`; of a short one, among others like it."""
    fastest = time_pass(target, cache, tree, context)
    if fastest < SHORT:
        others = (time_pass(target, cache, tree, context) for _ in range(1, IN_A_ROW))
        fastest = min(fastest, *others)
    return fastest


def step_costs(target: TargetModel) -> StepCosts:
    """Return the cost curve of a target model: measured once, then read from disk."""
    name = "step-costs"
    key = "-".join((machine_key(target), target.linear_kernels.name, target.attention.name))
    try:
        content = read_measured(name, key)
        near, far = (tuple(map(float, content[place])) for place in ("near", "far"))
        return StepCosts(tuple(map(int, content["sizes"])), near, far)
    except (ValueError, KeyError, TypeError):
        costs = measure(target)  # none there, or not one of ours
    write_measured(name, key, {"sizes": costs.sizes, "near": costs.near, "far": costs.far})
    return costs
