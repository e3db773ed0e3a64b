"""Measures the time of passes of a target model on this device: by number of nodes and context, and by CPU threads.

The curve is kept on disk only if the machine was steady, together with how steady it was. It is used
again only if a short check finds that passes still take the kept times.

More threads are not always faster. A small model's layers end before the threads have met; beside other work
threads wait for each other, and two can be ten times slower than one.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.passes.cache import TreeCache
from ..backends.target import TargetModel
from ..engine.read_out import USUAL_CANDIDATES
from ..engine.tree import DraftTree
from ..machine.files import read_measured, write_measured
from ..machine.timing import clocks, lost_share, relative_spread, seconds_of
from .cost_model import CONTEXTS, CostModel

logger = logging.getLogger(__name__)

NAME = "step-costs"
# Passes to time: (index of the context, nodes with the root). The last ones are left out for slow
# models. Matrix kernels work in blocks of eight rows, so costs jump after each block.
MAX_MEASURED_NODES = 64
PLAN = (
    *((0, 1), (0, 8), (0, 16), (0, 32), (1, 1), (0, MAX_MEASURED_NODES), (1, MAX_MEASURED_NODES)),
    *((0, 4), (0, 2), (0, 24), (0, 48), (0, 12), (0, 3), (0, 6)),
)
NUM_ESSENTIAL = 2
# Measuring stops after this time, so that the last passes end within three seconds.
SECONDS = 2.8
# Passes of less than `SHORT` milliseconds are run in a row, and the fastest counts: steps come in a
# row, and a single small pass after a larger one finds other data in the processor's caches.
IN_A_ROW, SHORT = 10, 20.0
MAX_ROUNDS = 9
# A measurement is kept if the machine was steady. Beside other work on both of two cores the spread
# was 0.06 to 0.3 with one thread and up to 26 with two, and 0.26 to 0.68 of the time was lost.
MOST_SPREAD, MOST_LOST = 0.1, 0.1
# Nodes of the passes that are compared with a kept curve, rounds and seconds of that, and the factor from which
# on the curve is measured again.
CHECKED = (1, 8)
CHECK_ROUNDS, CHECK_SECONDS = 3, 0.3
DISAGREES = 1.15
# Numbers of threads are timed with a draft of about as many nodes as most steps verify. It ends after this time, or
# once every number has been timed this long in all.
THREAD_CONTEXT, THREAD_NODES = 64, 8
THREAD_SECONDS, ENOUGH_SECONDS, LEAST_ROUNDS = 3.0, 0.3, 2
# Fewer threads than all must save this share of a pass's time: choices then repeat from run to run.
WORTHWHILE = 0.1


def step_costs(target: TargetModel) -> CostModel:
    """Return the step costs of a target model on this device: measured at the first call."""
    with target.lock:
        if NAME not in target.measured:
            target.measured[NAME] = costs = read_or_measure(target)
            target.expect_drafts(costs.sizes)
        found: CostModel = target.measured[NAME]
        return found


def read_or_measure(target: TargetModel) -> CostModel:
    """Return the step costs of a target model: read from disk if passes still take the kept times, else measured.

    A measurement that other work disturbed serves this process only.
    """
    target.pages.finish()  # passes are slow meanwhile
    names = [target.linear_kernels.name, target.attention.name]
    if target.programs:
        names.append(target.programs.name)
    if target.norms:
        names.append(target.norms.name)
    key = "-".join((target.machine_key, *names))
    kept = Measurement.read(read_measured(NAME, key))
    if kept is not None and kept.is_steady and agrees(target, kept.costs):
        return kept.costs
    found = measure_costs(target)
    if found.is_steady:
        write_measured(NAME, key, found.content())
    else:
        logger.info(
            "step costs: not kept, since other work disturbed them (spread %.0f%%, allowed %.0f%%; %.0f%% of the "
            "time lost to it, allowed %.0f%%); the next start measures again, close other programs before it",
            *(100 * share for share in (found.spread, MOST_SPREAD, found.lost, MOST_LOST)),
        )
    return found.costs


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measured cost curve, and how steady the machine was meanwhile."""

    costs: CostModel
    # Relative interquartile range of a pass's repeated timings, the median over passes.
    spread: float
    # Share of the time in which the measuring thread could not run; 0 where it may sleep, as beside a GPU.
    lost: float

    @classmethod
    def read(cls, content: Any) -> Measurement | None:
        """Return the measurement in a file's content; None if it is not a valid one."""
        try:
            near, far = (tuple(map(float, content[place])) for place in ("near", "far"))
            costs = CostModel(tuple(map(int, content["sizes"])), near, far)
            return cls(costs, float(content["spread"]), float(content["lost"]))
        except (ValueError, KeyError, TypeError):
            return None

    def content(self) -> dict[str, Any]:
        costs = self.costs
        curve = {"sizes": costs.sizes, "near": costs.near, "far": costs.far}
        return {**curve, "spread": self.spread, "lost": self.lost}

    @property
    def is_steady(self) -> bool:
        return self.spread <= MOST_SPREAD and self.lost <= MOST_LOST


@torch.inference_mode()
def agrees(target: TargetModel, costs: CostModel) -> bool:
    """Whether passes of one and eight nodes take the times of a curve, each and relative to each other."""
    kept = dict(zip(costs.sizes, costs.near, strict=True))
    sizes = [size for size in CHECKED if size in kept]
    if 1 not in sizes:
        return False
    time_of = _timer(target, sizes, farthest=0)
    fastest = dict.fromkeys(sizes, math.inf)
    deadline = time.perf_counter() + CHECK_SECONDS
    for _ in range(CHECK_ROUNDS):
        for size in sizes:
            fastest[size] = min(fastest[size], time_of(0, size))
        if time.perf_counter() > deadline:
            break
    factors = [fastest[size] / kept[size] for size in sizes]
    is_alike = all(1 / DISAGREES < factor < DISAGREES for factor in factors)
    return is_alike and max(factors) / min(factors) < DISAGREES


def measure_costs(target: TargetModel) -> Measurement:
    """Time passes of several sizes on the loaded model, in about `SECONDS`.

    If the model is too slow for all sizes, fewer are measured, and trees are chosen among these: at
    least one and eight nodes, however long they take.
    """
    since = clocks()
    times = _times(target)
    is_watched = target.device.type == "cpu"
    lost = lost_share(since, clocks()) if is_watched else 0.0
    medians = {point: statistics.median(values) for point, values in times.items()}
    spreads = [relative_spread(values) for values in times.values() if len(values) > 1]
    return Measurement(_curve(medians, contexts_of(target)), statistics.median(spreads), lost)


@torch.inference_mode()
def _times(target: TargetModel) -> dict[tuple[int, int], list[float]]:
    """Return repeated timings in milliseconds by (index of the context, nodes), the last one of one node."""
    # With padded drafts only the bucket sizes matter; no chain is longer than the context.
    longest = target.context_limit() or math.inf
    plan = [
        (place, size)
        for place, size in PLAN
        if target.padded_size(size) == size and size <= longest
    ]
    time_of = _timer(target, {size for _, size in plan}, farthest=1)
    times: dict[tuple[int, int], list[float]] = {}
    deadline = time.perf_counter() + SECONDS
    for _ in range(MAX_ROUNDS):
        for place, size in list(times) or plan:
            if time.perf_counter() > deadline and len(times) >= NUM_ESSENTIAL:
                break
            times.setdefault((place, size), []).append(time_of(place, size))
    times[0, 1].append(time_of(0, 1))
    return times


def _timer(
    target: TargetModel, sizes: Collection[int], farthest: int
) -> Callable[[int, int], float]:
    """Return the function that times a pass by (index of the context, nodes), for these sizes, 1 among them."""
    contexts = contexts_of(target)
    target.warm_up(contexts[farthest], set(sizes))
    cache = target.new_cache(contexts[1] + MAX_MEASURED_NODES)
    trees = {size: draft_of(target, size) for size in sizes}
    time_pass(target, cache, trees[1], contexts[0])  # the first pass pays for initialisation
    return lambda place, size: _time_in_a_row(target, cache, trees[size], contexts[place])


def _curve(medians: Mapping[tuple[int, int], float], contexts: Sequence[int]) -> CostModel:
    """Return the cost curve of these milliseconds by (index of the context, nodes)."""
    sizes = tuple(sorted(size for place, size in medians if place == 0))
    near = tuple(medians[0, size] for size in sizes)
    # The extra time of the longer context, for one node and the largest tree; linear between them.
    growth = {size: medians[1, size] - medians[0, size] for place, size in medians if place == 1}
    for_one = max(growth.get(1, 0.0), 0.0)
    for_each = max(growth.get(MAX_MEASURED_NODES, for_one) - for_one, 0.0) / (
        MAX_MEASURED_NODES - 1
    )
    # A model with a short context was measured only on part of the way to the longer one.
    way = contexts[1] - contexts[0]
    stretch = (CONTEXTS[1] - CONTEXTS[0]) / way if way else 0.0
    far = tuple(
        cost + stretch * (for_one + for_each * (size - 1))
        for cost, size in zip(near, sizes, strict=True)
    )
    return CostModel(sizes, near, far)


def contexts_of(target: TargetModel) -> list[int]:
    """Return `CONTEXTS`, or what a model with a short context has room for."""
    longest = (target.context_limit() or math.inf) - MAX_MEASURED_NODES
    return [max(0, int(min(context, longest))) for context in CONTEXTS]


def draft_of(target: TargetModel, num_nodes: int) -> DraftTree:
    """Return a draft of this many nodes for timing: a star if the model verifies trees, else a chain.

    States are read level by level, so that depth takes time: each node of that draft has two children.
    """
    tokens = [1] * num_nodes
    if target.mixers and not target.chain_only:
        parents = (-1, *((node - 1) // 2 for node in range(1, num_nodes)))
        return DraftTree.from_lists(tokens, parents)
    make = DraftTree.chain if target.chain_only else DraftTree.star
    return make(tokens)


def time_pass(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of one forward pass and its read-out after `context` cached rows.

    The contents of the rows do not matter for the time.
    """
    cache.set_length(context)

    def verify() -> None:
        logits = target.forward(tree, cache)
        target.read_out(cache, tree, logits, USUAL_CANDIDATES, with_samples=False)

    return 1e3 * seconds_of(verify, target.synchronize)


def _time_in_a_row(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of a pass as `time_pass`; a short one is timed among others like it."""
    fastest = time_pass(target, cache, tree, context)
    if fastest < SHORT:
        others = (time_pass(target, cache, tree, context) for _ in range(1, IN_A_ROW))
        fastest = min(fastest, *others)
    return fastest


def numbers_to_try(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})


def choose(milliseconds: dict[int, float]) -> int:
    """Return the fastest number of threads; all of them, unless fewer save a `WORTHWHILE` share."""
    fastest, most = min(milliseconds, key=lambda n: milliseconds[n]), max(milliseconds)
    is_better = milliseconds[fastest] < (1 - WORTHWHILE) * milliseconds[most]
    return fastest if is_better else most


@torch.inference_mode()
def use_fastest_threads(target: TargetModel) -> str:
    """Set torch's threads to the number that a pass is fastest with, up to the number set now.

    Returns:
        The choice in one line, with what it was made from; "" if there is nothing to choose, as on a GPU.
    """
    most = torch.get_num_threads()
    if target.device.type != "cpu" or most == 1:
        return ""
    limit = target.context_limit() or THREAD_CONTEXT + THREAD_NODES
    context = max(0, min(THREAD_CONTEXT, limit - THREAD_NODES))
    size = min(THREAD_NODES, limit)
    cache, tree = target.new_cache(context + size), draft_of(target, size)
    times: dict[int, list[float]] = {n: [] for n in numbers_to_try(most)}
    start = time.perf_counter()
    num_rounds = 0
    while True:
        for num_threads, found in times.items():
            torch.set_num_threads(num_threads)
            time_pass(target, cache, tree, context)  # the first wakes the threads
            found.append(time_pass(target, cache, tree, context))
        num_rounds += 1
        is_enough = min(map(sum, times.values())) > 1e3 * ENOUGH_SECONDS
        next_round = (time.perf_counter() - start) * (num_rounds + 1) / num_rounds
        if next_round > THREAD_SECONDS or (is_enough and num_rounds >= LEAST_ROUNDS):
            break
    # Means: beside other work most passes are undisturbed, and the few that wait take most of the time.
    means = {n: statistics.fmean(found) for n, found in times.items()}
    chosen = choose(means)
    torch.set_num_threads(chosen)
    tried = ", ".join(f"{ms:.1f} ms with {n}" for n, ms in means.items())
    return f"threads: {chosen} (a pass of {THREAD_NODES} nodes takes {tried} on average)"
