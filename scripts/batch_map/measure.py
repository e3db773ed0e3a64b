"""Measures batches: each method after the others, on the same texts, with memory from other texts.

A prompt is a page of this project's documentation and then a question, of so many tokens in all. Their rows are
computed once and used by all runs, which measure the steps after them alone: drafters learn from texts, not
from prompts' logits. (After a page without a question small models repeat
themselves, which makes drafts look too good.)
A run is so many steps, and no text ends before: every step has all texts, whatever they gain.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.budget.batch import BatchBudget, batch_budget
from model.engine.batch import Batch
from model.engine.cache import TreeCache
from model.engine.drafter import Drafter
from model.engine.target import TargetModel
from model.methods.registry import drafter_class

ROOT = Path(__file__).resolve().parents[2]
# The methods of the map, with their options; the first is the plain batch.
ENTRANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "pld": ("pld", {"budget": "auto"}),
    "recycling": ("recycling", {"tree_version": "auto"}),
    "hybrid": ("hybrid", {}),
    "hybrid, 7 nodes": ("hybrid", {"budget": "fixed", "num_nodes": 7}),
}
# Texts and steps of the warm-up, from which each method's memory comes, and tokens of their prompts.
WARM_TEXTS, WARM_STEPS, WARM_CONTEXT = 8, 48, 128
# Least texts of a run: where fewer make a batch, several batches in turn. One text alone says little.
LEAST_TEXTS = 4
# Most nodes of a draft that the rows of a prompt leave room for, and most tokens a step.
ROOM, MOST_A_STEP = 96, 25


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run.

    Attributes:
        context: tokens of each prompt.
        batch_size: texts.
        method: an entrant's name.
        round: number of the repetition.
        seconds: of all steps.
        tokens: new tokens of all texts.
        steps: of the batch, or of all batches in turn, each with all its texts.
        rows: nodes of all passes, roots included.
        predicted: tokens a second relative to the plain batch, by the measured step costs and the tokens and rows
            of a step.
    """

    context: int
    batch_size: int
    method: str
    round: int
    seconds: float
    tokens: int
    steps: int
    rows: int
    predicted: float


def prompts_of(
    pages: Sequence[int], questions: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """Return for each question a prompt of `length` tokens: a window of the pages, and the question's end.

    The windows are spread evenly; they overlap where there are too few pages for all.
    """
    step = max(0, len(pages) - length) / max(1, len(questions) - 1)
    prompts = []
    for index, question in enumerate(questions):
        start, end = int(step * index), list(question[-length:])
        prompts.append([*pages[start : start + length - len(end)], *end])
    return prompts


def documentation(tokenizer: Any) -> list[int]:
    """Return this project's documentation as one text."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return token_ids


class Bench:
    """Runs of one model.

    Args:
        target: the model.
        pages: what prompts begin with.
        questions: what they end with; the last `WARM_TEXTS` only fill the methods' memory.
        num_steps: of a run.
    """

    def __init__(
        self,
        target: TargetModel,
        pages: Sequence[int],
        questions: Sequence[Sequence[int]],
        num_steps: int,
    ) -> None:
        self._target, self._pages, self._num_steps = target, pages, num_steps
        self._questions = questions[:-WARM_TEXTS]
        self._costs = BatchBudget(target)
        self._first: dict[str, Drafter] = {}
        self._budgets: dict[str, BatchBudget | None] = {}
        warm = prompts_of(pages, questions[-WARM_TEXTS:], WARM_CONTEXT)
        for name in ENTRANTS:
            self._first[name] = first = self._new_drafter(name)
            self._budgets[name] = batch_budget(first, target)
            self._decode(name, first, [(prompt, None) for prompt in warm], WARM_STEPS)

    def runs(
        self, context: int, batch_sizes: Sequence[int], num_rounds: int, done: Callable[[], object]
    ) -> Iterator[Run]:
        """Yield the runs of a context; `done` is called after each, also after those that only warm up."""
        num_texts = max(LEAST_TEXTS, *batch_sizes)
        prompts = prompts_of(self._pages, self._questions[:num_texts], context)
        caches, names = [self._read(prompt) for prompt in prompts], list(ENTRANTS)
        for batch_size in batch_sizes:
            texts = list(zip(prompts, caches, strict=True))
            ends = range(batch_size, max(LEAST_TEXTS, batch_size) + 1, batch_size)
            batches = [texts[end - batch_size : end] for end in ends]
            for number in range(num_rounds + 1):
                for place in range(len(names)):
                    # Each round begins with another entrant: the one before leaves the caches its data.
                    name = names[(place + number) % len(names)]
                    run = self._run(name, context, batches, number)
                    done()
                    if number:
                        yield run

    def _run(
        self,
        name: str,
        context: int,
        batches: Sequence[Sequence[tuple[list[int], TreeCache]]],
        number: int,
    ) -> Run:
        drafter = self._new_drafter(name)
        if memory := self._first[name].memory():
            drafter.load_memory(memory)
        for prompt, cache in itertools.chain(*batches):
            cache.keep(len(prompt) - 1, ())
        seconds, tokens, steps, rows = 0.0, 0, 0, 0
        for texts in batches:
            part = self._decode(name, drafter, texts, self._num_steps)
            seconds, tokens = seconds + part[0], tokens + part[1]
            steps, rows = steps + part[2], rows + part[3]
        size = len(batches[0])
        middle = context + tokens // size // len(batches) // 2
        factor = self._costs.cost(size, size, middle) / self._costs.cost(
            size, round(rows / steps), middle
        )
        predicted = tokens / steps / size * factor
        return Run(context, size, name, number, seconds, tokens, steps, rows, predicted)

    def _decode(
        self,
        name: str,
        drafter: Drafter,
        texts: Sequence[tuple[list[int], TreeCache | None]],
        num_steps: int,
    ) -> tuple[float, int, int, int]:
        """Decode steps of texts as one batch; return seconds, tokens, steps and rows of the steps."""
        batch = Batch(self._target, len(texts), self._budgets[name])
        for key, (prompt, cache) in enumerate(texts):
            batch.add(
                key, drafter.sibling(), prompt, max_new_tokens=num_steps * MOST_A_STEP, cache=cache
            )
        seconds, tokens, steps, rows = 0.0, 0, 0, 0
        while steps < num_steps:
            start = time.perf_counter()
            events = batch.step()
            taken = time.perf_counter() - start
            records = [event.record for event in events if event.record]
            if error := next((event.error for event in events if event.error), None):
                raise error
            if records:  # else prompts alone were read
                seconds += taken
                steps += 1
                tokens += sum(len(record.tokens) for record in records)
                rows += sum(record.num_nodes for record in records)
        return seconds, tokens, steps, rows

    def _new_drafter(self, name: str) -> Drafter:
        method, options = ENTRANTS[name]
        cls = drafter_class(method)
        return cls(cls.config_class(**options), self._target.vocab_size, self._target.device)

    @torch.inference_mode()
    def _read(self, prompt: Sequence[int]) -> TreeCache:
        cache = self._target.new_cache(len(prompt) + self._num_steps * MOST_A_STEP + ROOM)
        for _ in self._target.prefill(prompt, cache, with_logits=False):
            pass
        return cache
