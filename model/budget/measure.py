"""Measures the time of passes of a target model on this device, by number of nodes and context."""

from __future__ import annotations

import statistics
import time

import torch

from ..engine.cache import TreeCache
from ..engine.read_out import read_out
from ..engine.target import TargetModel
from ..engine.tree import DraftTree
from ..machine.measurements import read_measured, write_measured
from ..machine.timing import seconds_of
from .cost_model import CONTEXTS, CostModel

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


def step_costs(target: TargetModel) -> CostModel:
    """Return the step costs of a target model on this device: measured at the first call."""
    with target.lock:
        if NAME not in target.measured:
            target.measured[NAME] = costs = read_or_measure(target)
            target.will_draft(costs.sizes)
        found: CostModel = target.measured[NAME]
        return found


def read_or_measure(target: TargetModel) -> CostModel:
    """Return the step costs of a target model: measured once, then read from disk."""
    key = "-".join((target.machine_key, target.linear_kernels.name, target.attention.name))
    try:
        content = read_measured(NAME, key)
        near, far = (tuple(map(float, content[place])) for place in ("near", "far"))
        return CostModel(tuple(map(int, content["sizes"])), near, far)
    except (ValueError, KeyError, TypeError):
        costs = measure(target)  # no file, or not a valid one
    write_measured(NAME, key, {"sizes": costs.sizes, "near": costs.near, "far": costs.far})
    return costs


@torch.inference_mode()
def measure(target: TargetModel) -> CostModel:
    """Time passes of several sizes on the loaded model, in about `SECONDS`.

    If the model is too slow for all sizes, fewer are measured, and trees are chosen among these: at
    least one and eight nodes, however long they take.
    """
    longest = target.context_limit(1) or CONTEXTS[1] + MAX_MEASURED_NODES
    contexts = [max(0, min(context, longest - MAX_MEASURED_NODES)) for context in CONTEXTS]
    # With padded drafts only the bucket sizes matter; no chain is longer than the context.
    plan = [
        (place, size)
        for place, size in PLAN
        if target.padded_size(size) == size and size <= longest
    ]
    target.warm_up(contexts[1], {size for _, size in plan})
    cache = target.new_cache(contexts[1] + MAX_MEASURED_NODES)
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


def draft_of(target: TargetModel, num_nodes: int) -> DraftTree:
    """Return a draft of this many nodes for timing: a star if the model verifies trees, else a chain."""
    make = DraftTree.chain if target.chain_only else DraftTree.star
    return make([1] * num_nodes, target.device)


def has_room(target: TargetModel, num_nodes: int, context: int) -> bool:
    """Whether a draft from `draft_of` fits the model's context after `context` tokens; a star has depth 1."""
    limit = target.context_limit(context + 1)
    return not target.chain_only or limit is None or context + num_nodes <= limit


def time_pass(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of one forward pass and its read-out after `context` cached rows.

    The contents of the rows do not matter for the time.
    """
    cache.keep(context, ())

    def verify() -> None:
        read_out(tree, target.forward(tree, cache), num_candidates=8)

    return 1e3 * seconds_of(verify, target.synchronize)


def _time_in_a_row(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of a pass as `time_pass`; a short one is timed among others like it."""
    fastest = time_pass(target, cache, tree, context)
    if fastest < SHORT:
        others = (time_pass(target, cache, tree, context) for _ in range(1, IN_A_ROW))
        fastest = min(fastest, *others)
    return fastest
