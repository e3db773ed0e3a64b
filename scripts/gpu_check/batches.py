"""Batches: tokens per second over the number of texts that share passes, beside transformers' padded batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product

import torch

from evaluation.inference.referees import left_padded
from model.budget.batch import batch_budget
from model.engine.batch import Batch, run
from model.engine.drafter import Drafter
from model.engine.packing import why_not_packed
from model.engine.request import Request
from model.engine.target import TargetModel
from scripts.gpu_check.bench import GRAPHS, Bench, Found, drafter_of

PLAIN, GENERATE = "vanilla", "generate"
METHODS = (PLAIN, "recycling-auto", "hybrid")
SIZES, FEW_SIZES = (1, 2, 4, 8, 16), (1, 2)
# Texts for each place: the second takes the place of a first one that has ended.
TEXTS_A_PLACE = 2

# Tokens per second, prompts included, and tokens a step of a text.
Speed = tuple[float, float]


def batches(bench: Bench, found: Found) -> None:
    """Decode the same texts in batches of every size, the methods in turn; and by `generate`, padded."""
    target = bench.target(GRAPHS)
    if why := why_not_packed(target):
        found.problems.append(f"texts are decoded in turn: {why}")
    drafters = {name: drafter_of(name, target) for name in METHODS}
    runs: dict[tuple[int, str], list[Speed]] = {}
    sizes, rounds, num_tokens = bench.sized((SIZES, 3, 48), (FEW_SIZES, 2, 3))
    for index, size in bench.in_time(product(range(rounds), sizes), found):
        prompts = bench.prompts(TEXTS_A_PLACE * size)
        calls = {
            name: partial(_batch, target, drafter, size, prompts, num_tokens)
            for name, drafter in drafters.items()
        }
        if index:  # it captures nothing
            calls[GENERATE] = partial(_padded, target, size, prompts, num_tokens)
        for name, call in calls.items():
            speed = found.attempt(f"{name}, {size} texts", call)
            if index and speed:  # the first round captures graphs
                runs.setdefault((size, name), []).append(speed)
    rows = []
    for size, name in sorted(runs):
        speeds, tokens = zip(*runs[size, name], strict=True)
        plain = [speed for speed, _ in runs.get((size, PLAIN), ())]
        ratios = [one / other for one, other in zip(speeds, plain, strict=False)]
        row = {"size": size, "method": name, "tokens_per_second": statistics.median(speeds)}
        row["over_plain"] = statistics.median(ratios) if ratios else None
        rows.append(row | {"tokens_a_step": statistics.median(tokens)})
    found.figures["rows"] = rows
    header = ("texts", "method", "tokens/s", "x of the plain batch", "tokens a step")
    title = f"texts that share passes as graphs, {TEXTS_A_PLACE} for each place; medians, prompts included"
    bench.show(title, header, [list(row.values()) for row in rows])


def _batch(
    target: TargetModel,
    drafter: Drafter,
    size: int,
    prompts: Sequence[list[int]],
    num_tokens: int,
) -> Speed:
    """Decode texts of the same number of tokens, up to `size` at a time; they share a memory that begins empty."""
    drafter.reset()  # an earlier round has decoded the same texts
    budget = batch_budget(drafter, target) if size > 1 else None
    batch = Batch(target, drafter, size, budget)
    lengths: list[int] = []
    target.synchronize()
    start = time.perf_counter()
    for event in run(batch, enumerate(Request(prompt, num_tokens) for prompt in prompts)):
        if event.error is not None:
            raise event.error
        lengths += [len(step.tokens) for step in event.steps]
    return sum(lengths) / (time.perf_counter() - start), sum(lengths) / len(lengths)


@torch.inference_mode()
def _padded(target: TargetModel, size: int, prompts: Sequence[list[int]], num_tokens: int) -> Speed:
    """Let transformers decode the same texts, in batches that are padded on the left."""
    target.synchronize()
    start = time.perf_counter()
    for begin in range(0, len(prompts), size):
        target.model.generate(
            **left_padded(prompts[begin : begin + size], target.device),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=-1,
            pad_token_id=0,
        )
    target.synchronize()
    return num_tokens * len(prompts) / (time.perf_counter() - start), 1.0
