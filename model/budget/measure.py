"""Measures what passes of a target model cost on this device, by their nodes and context."""

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
# What is timed: (which context, nodes with the root). What a slow model has no time for comes last.
# Matrix kernels work in blocks of eight rows, so that costs jump after each.
MAX_MEASURED_NODES = 64
PLAN = (
    *((0, 1), (0, 8), (0, 16), (0, 32), (1, 1), (0, MAX_MEASURED_NODES), (1, MAX_MEASURED_NODES)),
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


def step_costs(target: TargetModel) -> CostModel:
    """Return what a step of a target model costs on this device: measured at the first call."""
    with target.lock:
        if NAME not in target.measured:
            target.measured[NAME] = costs = read_or_measure(target)
            target.will_draft(costs.sizes)
        found: CostModel = target.measured[NAME]
        return found


def read_or_measure(target: TargetModel) -> CostModel:
    """Return the cost curve of a target model: measured once, then read from disk."""
    key = "-".join((target.machine_key, target.linear_kernels.name, target.attention.name))
    try:
        content = read_measured(NAME, key)
        near, far = (tuple(map(float, content[place])) for place in ("near", "far"))
        return CostModel(tuple(map(int, content["sizes"])), near, far)
    except (ValueError, KeyError, TypeError):
        costs = measure(target)  # none there, or not one of ours
    write_measured(NAME, key, {"sizes": costs.sizes, "near": costs.near, "far": costs.far})
    return costs


@torch.inference_mode()
def measure(target: TargetModel) -> CostModel:
    """Time passes of several sizes on the loaded model, in about `SECONDS`.

    Where the model is too slow for all sizes, fewer are measured, and trees are chosen among these:
    at least one and eight nodes, however long they take.
    """
    longest = target.context_limit(1) or CONTEXTS[1] + MAX_MEASURED_NODES
    contexts = [max(0, min(context, longest - MAX_MEASURED_NODES)) for context in CONTEXTS]
    # Where drafts are padded, others cost what these do; no chain is longer than the context.
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
    # What the longer context costs one node and the largest tree; between them, by the nodes.
    growth = {size: medians[1, size] - medians[0, size] for place, size in medians if place == 1}
    for_one = max(growth.get(1, 0.0), 0.0)
    for_each = max(growth.get(MAX_MEASURED_NODES, for_one) - for_one, 0.0) / (
        MAX_MEASURED_NODES - 1
    )
    # A model whose context is shorter than the longer one was measured on a part of the way there.
    way = contexts[1] - contexts[0]
    stretch = (CONTEXTS[1] - CONTEXTS[0]) / way if way else 0.0
    far = tuple(
        cost + stretch * (for_one + for_each * (size - 1))
        for cost, size in zip(near, sizes, strict=True)
    )
    return CostModel(sizes, near, far)


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
