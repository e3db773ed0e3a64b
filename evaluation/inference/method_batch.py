"""A method that answers several prompts at a time, in passes that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from evaluation.answers.row import Turn
from evaluation.inference.answering import Failure, Prompt
from evaluation.inference.config import DecodingOptions
from evaluation.inference.turns import token_rule, turn_of
from model.budget.batch import batch_budget
from model.commands.command_line import UserError
from model.engine.batch import Batch
from model.engine.drafter import Drafter
from model.engine.request import Request
from model.engine.step import StepRecord
from model.engine.target import TargetModel


@dataclass(slots=True)
class _UnderWay:
    """A turn under way."""

    num_prompt: int
    start: float  # on the batch's clock
    cpu_time: float = 0.0


class MethodBatch:
    """A drafter on a target model, with siblings that draft for the texts: they learn together.

    Its clock stands while nothing is decoded, so that what a user waits for is the texts of the batch alone.

    Raises:
        UserError: if the method answers one by one only.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        sampling: DecodingOptions,
        eos_ids: Collection[int],
        size: int,
        stop: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        check_batch_size(size, drafter)
        self.size = size
        self._target, self._drafter = target, drafter
        self._generators = [torch.Generator(device=target.device) for _ in range(size)]
        self._rules = [token_rule(sampling, generator) for generator in self._generators]
        self._max_new_tokens, self._eos_ids, self._stop = sampling.max_new_tokens, eos_ids, stop
        self._under_way: dict[int, _UnderWay] = {}
        self._clock = 0.0

    # Made at the first turn, since costs are measured then: by that time the run has chosen its number of threads.
    @cached_property
    def _batch(self) -> Batch:
        budget = batch_budget(self._drafter, self._target)
        return Batch(self._target, self._drafter, self.size, budget)

    def ask(self, slot: int, prompt: Prompt) -> None:
        if prompt.seed is not None:
            self._generators[slot].manual_seed(prompt.seed)
        limit, rule = self._max_new_tokens, self._rules[slot]
        request = Request(prompt.token_ids, limit, self._eos_ids, rule, self._stop)
        self._batch.add(slot, request)
        self._under_way[slot] = _UnderWay(len(prompt.token_ids), self._clock)

    def ended(self) -> list[tuple[int, Turn | Failure]]:
        found: list[tuple[int, Turn | Failure]] = []
        while not found:
            try:
                found = self._step()
            except Exception as error:  # of the pass that all share
                found = [(slot, Failure.of(error)) for slot in self._under_way]
                for slot in self._under_way:
                    self._batch.remove(slot)
        for slot, _ in found:
            del self._under_way[slot]
        return found

    def _step(self) -> list[tuple[int, Turn | Failure]]:
        """Decode a step of every turn; return those that ended, by slot."""
        start, cpu_start = time.perf_counter(), time.process_time()
        events = self._batch.step()
        self._clock += time.perf_counter() - start
        cpu_share = (time.process_time() - cpu_start) / len(self._under_way)
        for turn in self._under_way.values():
            turn.cpu_time += cpu_share
        found: list[tuple[int, Turn | Failure]] = []
        for event in events:
            turn = self._under_way[event.key]
            if event.error is not None:
                found.append((event.key, Failure.of(event.error)))
            elif event.is_last:
                found.append((event.key, self._turn(turn, event.steps)))
        return found

    def _turn(self, turn: _UnderWay, steps: Sequence[StepRecord]) -> Turn:
        share_time = sum(step.share_ns for step in steps) / 1e9
        return turn_of(steps, turn.num_prompt, self._clock - turn.start, turn.cpu_time, share_time)


def check_batch_size(size: int, drafter: Drafter) -> None:
    """Refuse a batch of a method that forgets before each question.

    Raises:
        UserError: in such a case.
    """
    if size > 1 and drafter.needs.cold_start:
        raise UserError(
            f"batch_size: got {size} with a cold start, which clears the memory before each question while others "
            "still use it; allowed: 1; leave one of them out"
        )
