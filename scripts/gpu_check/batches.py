"""Batches: tokens per second over the number of texts that share passes, beside transformers' padded batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from evaluation.inference.entrants import entrant_of
from evaluation.inference.referees import left_padded
from model.budget.batch import batch_budget
from model.commands.matrix_file import make_drafter
from model.engine.batch import Batch, run
from model.engine.drafter import Drafter
from model.engine.packing import why_not_packed
from model.engine.request import Request
from model.engine.target import TargetModel
from model.methods import Method
from scripts.gpu_check.bench import GRAPHS, Bench, Found, cell

PLAIN, GENERATE = "vanilla", "generate"
METHODS = (PLAIN, "recycling-auto", "hybrid")
SIZES, FEW_SIZES = (1, 2, 4, 8, 16), (1, 2)
# Texts for each place: the second takes the place of a first one that has ended.
TEXTS_A_PLACE = 2
# Tokens of each text; on the simulated device, where only the code is tried, fewer.
NUM_TOKENS, FEW_TOKENS = 48, 3
# The first round captures graphs, and what it takes is not counted.
ROUNDS = 3


class Decoded(NamedTuple):
    """The outcome of a run: how many tokens, in what time, prompts included, and how many a step of a text."""

    num_tokens: int
    seconds: float
    tokens_a_step: float


def batches(bench: Bench, found: Found) -> None:
    """Decode the same texts in batches of every size, the methods in turn; and by `generate`, padded."""
    target = bench.target(GRAPHS)
    if why := why_not_packed(target):
        found.problems.append(f"texts are decoded in turn: {why}")
    drafters = {name: _drafter(target, name) for name in METHODS}
    runs: dict[tuple[int, str], list[Decoded]] = {}
    sizes, rounds = (FEW_SIZES, 2) if bench.is_simulated else (SIZES, ROUNDS)
    for index, size in bench.in_time(list(product(range(rounds), sizes)), found):
        prompts = bench.prompts(TEXTS_A_PLACE * size)
        num_tokens = FEW_TOKENS if bench.is_simulated else NUM_TOKENS
        calls = {
            name: partial(_batch, target, drafter, size, prompts, num_tokens)
            for name, drafter in drafters.items()
        }
        if index:  # it captures nothing
            calls[GENERATE] = partial(_padded, target, size, prompts, num_tokens)
        for name, call in calls.items():
            done = found.attempt(f"{name}, {size} texts", call)
            if index and done:
                runs.setdefault((size, name), []).append(done)
    rows = [_row(size, name, runs) for size, name in sorted(runs)]
    found.figures["rows"] = rows
    header = ("texts", "method", "tokens/s", "x of the plain batch", "tokens a step")
    keys = ("tokens_per_second", "over_plain", "tokens_a_step")
    body = [[str(row["size"]), row["method"], *(cell(row[key]) for key in keys)] for row in rows]
    title = f"texts that share passes as graphs, {TEXTS_A_PLACE} for each place; medians, prompts included"
    bench.show(title, header, body)


def _row(size: int, name: str, runs: dict[tuple[int, str], list[Decoded]]) -> dict[str, Any]:
    """Return the figures of a method: medians, the ratio to plain decoding that of each round."""
    speeds = {
        method: [one.num_tokens / one.seconds for one in runs.get((size, method), ())]
        for method in (name, PLAIN)
    }
    ratios = [one / other for one, other in zip(speeds[name], speeds[PLAIN], strict=False)]
    return {
        "size": size,
        "method": name,
        "tokens_per_second": statistics.median(speeds[name]),
        "over_plain": statistics.median(ratios) if ratios else None,
        "tokens_a_step": statistics.median(one.tokens_a_step for one in runs[size, name]),
    }


def _drafter(target: TargetModel, name: str) -> Drafter:
    entrant = entrant_of(name)
    assert isinstance(entrant.method, Method)
    return make_drafter(entrant.method, entrant.config, target.vocab_size, target.device, {})


def _batch(
    target: TargetModel,
    drafter: Drafter,
    size: int,
    prompts: Sequence[list[int]],
    num_tokens: int,
) -> Decoded:
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
    seconds = time.perf_counter() - start
    return Decoded(sum(lengths), seconds, sum(lengths) / len(lengths))


@torch.inference_mode()
def _padded(
    target: TargetModel, size: int, prompts: Sequence[list[int]], num_tokens: int
) -> Decoded:
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
    return Decoded(num_tokens * len(prompts), time.perf_counter() - start, 1.0)
