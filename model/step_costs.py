"""What a step costs on this device, measured.

A drafted node has a price: the time by which it lengthens the forward pass. The price depends on
the device, the model, the dtype and the threads, so it is measured on the loaded model, through the
same pass and the same read-out that decoding uses, once, and kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.draft_tree import DraftTree
from model.prices import Prices
from model.verification import read_out

if TYPE_CHECKING:
    from model.hf import TargetModel
    from model.kv_cache import TreeCache

# What is timed: (which context, nodes with the root). What a slow model has no time for comes last.
# Matrix kernels work in blocks of eight rows, so that costs jump after each.
LARGEST = 64
CONTEXTS = (256, 1280)
PLAN = (
    *((0, 1), (0, 8), (0, 16), (0, 32), (1, 1), (0, LARGEST), (1, LARGEST)),
    *((0, 4), (0, 2), (0, 24), (0, 48), (0, 12), (0, 3), (0, 6)),
)
NUM_ESSENTIAL = 2
SECONDS = 3.0
MAX_ROUNDS = 9
# Steps over which the loop's own work for a node is averaged.
MEMORY = 64


@dataclass(slots=True)
class StepCosts:
    """The measured cost curve of a target model.

    Attributes:
        sizes: nodes of a pass, root included, rising from 1.
        near: milliseconds of a pass at `CONTEXTS[0]` cached tokens, by size.
        far: the same at `CONTEXTS[1]`.
        node_milliseconds: what the loop and the drafter add for every drafted node; learned while
            decoding.
    """

    sizes: tuple[int, ...]
    near: tuple[float, ...]
    far: tuple[float, ...]
    node_milliseconds: float = 0.0
    _at: dict[int, Prices] = field(default_factory=dict, repr=False)
    _num_learned: int = 0

    def at(self, context: int) -> Prices:
        """Return the prices after `context` cached tokens: attention grows linearly with it."""
        block = context // 128
        if block not in self._at:
            share = (block * 128 + 64 - CONTEXTS[0]) / (CONTEXTS[1] - CONTEXTS[0])
            costs = [
                near + max(share * (far - near), -0.5 * near)
                for near, far in zip(self.near, self.far, strict=True)
            ]
            added = [self.node_milliseconds * (size - 1) for size in self.sizes]
            totals = [cost + extra for cost, extra in zip(costs, added, strict=True)]
            # A smaller pass never costs more: where it was measured so, that was noise.
            lowest = list(accumulate(reversed(totals), min))[::-1]
            self._at[block] = Prices(self.sizes, tuple(lowest))
        return self._at[block]

    def learn(self, num_nodes: int, host_nanoseconds: int) -> None:
        """Take note of the host's work (drafting, keeping, observing) on a step with this many
        nodes.
        """
        if num_nodes > 1:
            per_node = host_nanoseconds / 1e6 / (num_nodes - 1)
            self.node_milliseconds += (per_node - self.node_milliseconds) / MEMORY
            self._num_learned += 1
            if self._num_learned % MEMORY == 0:
                self._at.clear()


@torch.inference_mode()
def measure(target: TargetModel) -> StepCosts:
    """Time passes of several sizes on the loaded model, in about `SECONDS`.

    Where the model is too slow for all sizes, fewer are measured, and trees are chosen among these:
    at least one and eight nodes, however long they take.
    """
    longest = target.context_limit(1) or CONTEXTS[1] + LARGEST
    contexts = [min(context, longest - LARGEST) for context in CONTEXTS]
    target.warm_up(contexts[1], {size for _, size in PLAN})
    cache = target.new_cache(contexts[1] + LARGEST)
    trees = {size: _star(target, size) for _, size in PLAN}
    time_pass(target, cache, trees[1], contexts[0])  # the first pass pays for initialisation
    times: dict[tuple[int, int], list[float]] = {}
    deadline = time.perf_counter() + SECONDS
    for _ in range(MAX_ROUNDS):
        for place, size in list(times) or PLAN:
            if time.perf_counter() > deadline and len(times) >= NUM_ESSENTIAL:
                break
            cost = time_pass(target, cache, trees[size], contexts[place])
            times.setdefault((place, size), []).append(cost)
    medians = {point: statistics.median(values) for point, values in times.items()}
    sizes = tuple(sorted(size for place, size in medians if place == 0))
    near = tuple(medians[0, size] for size in sizes)
    # What the longer context costs one node and the largest tree; between them, by the nodes.
    growth = {size: medians[1, size] - medians[0, size] for place, size in medians if place == 1}
    for_one = max(growth.get(1, 0.0), 0.0)
    for_each = max(growth.get(LARGEST, for_one) - for_one, 0.0) / (LARGEST - 1)
    far = tuple(
        cost + for_one + for_each * (size - 1) for cost, size in zip(near, sizes, strict=True)
    )
    return StepCosts(sizes, near, far)


def time_pass(target: TargetModel, cache: TreeCache, tree: DraftTree, context: int) -> float:
    """Return the milliseconds of one forward pass and its read-out after `context` cached rows.

    The rows are whatever the buffers hold: time does not depend on them.
    """
    cache.keep(context, ())
    target.synchronize()
    start = time.perf_counter()
    read_out(tree, target.forward(tree, cache), num_candidates=8)
    target.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _star(target: TargetModel, num_nodes: int) -> DraftTree:
    """Return a tree whose nodes all hang from the root: it has a tree's mask at any size."""
    parents = tuple(range(-1, num_nodes - 1)) if target.chain_only else (-1, *[0] * (num_nodes - 1))
    return DraftTree.from_lists([1] * num_nodes, parents, target.device)


def step_costs(target: TargetModel) -> StepCosts:
    """Return the cost curve of a target model: measured once for a model's shape, device, dtype and
    number of threads, then read from the cache folder (`TOKEN_RECYCLING_CACHE`, by default
    `token-recycling` in the user's cache folder); delete the file there to measure again.
    """
    file = _cache_folder() / f"step-costs-{_key(target)}.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        near, far = (tuple(map(float, content[name])) for name in ("near", "far"))
        return StepCosts(tuple(map(int, content["sizes"])), near, far)
    except (OSError, ValueError, KeyError, TypeError):
        costs = measure(target)  # none there, or not one of ours
    content = {"sizes": costs.sizes, "near": costs.near, "far": costs.far}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError:
        pass  # a read-only home: measured again next time
    return costs


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TOKEN_RECYCLING_CACHE") or Path(base) / "token-recycling")


def _key(target: TargetModel) -> str:
    """Return a name for everything that a pass's time depends on."""
    is_cuda = target.device.type == "cuda"
    device = torch.cuda.get_device_name(target.device) if is_cuda else str(target.device)
    parts = (
        target.config.to_json_string(use_diff=False),
        target.model.config._attn_implementation,
        type(target).__name__,
        device,
        f"{platform.processor()} {platform.machine()} {os.cpu_count()} {torch.get_num_threads()}",
        f"{target.dtype} {torch.__version__}",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
