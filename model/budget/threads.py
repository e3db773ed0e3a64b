"""Chooses the number of CPU threads: a pass of the loaded model is timed with several numbers.

More threads are not always faster. A small model's layers end before the threads have met; beside
other work threads wait for each other, and two can be ten times slower than one.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from ..backends.target import TargetModel
from .measure import draft_of, time_pass

# Measuring ends after this time, or once every number has been timed this long in all.
SECONDS, ENOUGH_SECONDS = 3.0, 0.3
LEAST_ROUNDS = 2
CONTEXT = 64
# Nodes of the timed draft, about as many as most steps verify.
NUM_NODES = 8
# Fewer threads than all must save this share of a pass's time: choices then repeat from run to run.
WORTHWHILE = 0.1


class ThreadChoice(NamedTuple):
    """The number of threads that was chosen, and the milliseconds of a pass with each that was tried."""

    num_threads: int
    milliseconds: dict[int, float]

    def __str__(self) -> str:
        """Return the choice in one line, with what it was made from."""
        tried = ", ".join(f"{ms:.1f} ms with {n}" for n, ms in self.milliseconds.items())
        return f"threads: {self.num_threads} (a pass of {NUM_NODES} nodes takes {tried} on average)"


def numbers_to_try(most: int) -> list[int]:
    return sorted({1, max(1, most // 2), most})


def choose(milliseconds: dict[int, float]) -> ThreadChoice:
    """Return the fastest number of threads; all of them, unless fewer save a `WORTHWHILE` share."""
    fastest, most = min(milliseconds, key=lambda n: milliseconds[n]), max(milliseconds)
    is_better = milliseconds[fastest] < (1 - WORTHWHILE) * milliseconds[most]
    return ThreadChoice(fastest if is_better else most, milliseconds)


@torch.inference_mode()
def use_fastest_threads(target: TargetModel) -> ThreadChoice | None:
    """Set torch's threads to the number that a pass is fastest with, up to the number set now.

    Returns None if there is nothing to choose, as on a GPU.
    """
    most = torch.get_num_threads()
    if target.device.type != "cpu" or most == 1:
        return None
    limit = target.context_limit(1) or CONTEXT + NUM_NODES
    context = max(0, min(CONTEXT, limit - NUM_NODES))
    size = min(NUM_NODES, limit)
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
        if next_round > SECONDS or (is_enough and num_rounds >= LEAST_ROUNDS):
            break
    # Means: beside other work most passes are undisturbed, and the few that wait take most of the time.
    choice = choose({n: statistics.fmean(found) for n, found in times.items()})
    torch.set_num_threads(choice.num_threads)
    return choice
