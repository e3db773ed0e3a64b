"""A method on a loaded model, which answers questions, and how it is made."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StopStringCriteria

from evaluation.answers.row import AnswerRow, Turn
from evaluation.inference.config import DecodingOptions, RunConfig
from evaluation.inference.held_bytes import held_bytes
from evaluation.inference.low_memory import LeanDrafter
from evaluation.inference.method_batch import MethodBatch
from evaluation.inference.question import Answerer, Asking, BatchAnswerer, answer_row
from evaluation.inference.referees import Referee
from evaluation.inference.turns import token_rule, turn_of
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question
from model.api.stop_strings import ends_text, stop_criterion
from model.commands.command_line import user_errors
from model.commands.loading import CheckedModel, load_target
from model.commands.matrix_file import make_drafter
from model.engine.drafter import Drafter
from model.engine.loop import generate
from model.engine.support import eos_ids_of
from model.engine.target import TargetModel
from model.methods import Method

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Setup:
    """Everything needed to answer questions but the weights: small enough to be sent to a worker.

    `longest_text` is the number of tokens that a question can grow to; 0 where it is not needed.
    """

    method: Method | Referee
    run: RunConfig
    config: Any
    model: CheckedModel
    conversation: Conversation
    start_memory: dict[str, torch.Tensor]
    model_id: str
    longest_text: int = 0

    @property
    def asking(self) -> Asking:
        """How this run asks questions."""
        choices, seed = self.run.answers.num_choices, self.run.sampling.seed
        return Asking(self.conversation, self.model_id, choices, seed)

    def ask(self, answerer: Answerer, question: Question) -> AnswerRow:
        """Answer a question as this run does."""
        return answer_row(answerer, self.asking, question)


class MethodAnswerer:
    """A drafter on a target model, as an `Answerer`; a `UserError` if they do not fit each other."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        sampling: DecodingOptions,
        eos_ids: frozenset[int],
        longest_text: int = 0,
        batch_size: int = 1,
        stop: StopStringCriteria | None = None,
    ) -> None:
        with user_errors():
            drafter.check_target(target)
        self.target = target
        self._longest_text = longest_text
        self.drafter = drafter
        self._max_new_tokens = sampling.max_new_tokens
        self._eos_ids = eos_ids
        self._is_warm = False  # answers before that are not measured
        self._generator = torch.Generator(device=target.device)
        self._rule = token_rule(sampling, self._generator)
        self._stop = ends_text(stop, target.device)
        self.batch: BatchAnswerer | None = None
        if batch_size > 1:
            self.batch = MethodBatch(target, drafter, sampling, eos_ids, batch_size, self._stop)

    def seed(self, seed: int) -> None:
        self._generator.manual_seed(seed)

    def begin_question(self) -> None:
        if self.drafter.needs.cold_start:
            self.drafter.reset()

    def answer(self, prompt_ids: list[int]) -> Turn:
        num_late = self.target.shapes.num_late
        start, cpu_start = time.perf_counter(), time.process_time()
        generation = generate(
            self.target,
            self.drafter,
            prompt_ids,
            max_new_tokens=self._max_new_tokens,
            eos_ids=self._eos_ids,
            rule=self._rule,
            stop=self._stop,
        )
        wall_time, cpu_time = time.perf_counter() - start, time.process_time() - cpu_start
        num_captured = self.target.shapes.num_late - num_late
        if self._is_warm and num_captured:
            logger.warning(
                "%d shapes were captured within an answer; its time includes the captures",
                num_captured,
            )
        return turn_of(generation.steps, len(prompt_ids), wall_time, cpu_time)

    @contextmanager
    def lean(self) -> Iterator[None]:
        """Draft short chains, and do not read the prompt's logits, within the context."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        drafter = self.drafter
        self.drafter = LeanDrafter(drafter)
        try:
            yield
        finally:
            self.drafter = drafter

    def notes(self) -> list[str]:
        """Return lines about this run for the log."""
        chain = f"chain drafts only: {self.target.chain_reason}" if self.target.chain_only else ""
        size = self.target.num_state_bytes / 2**20
        states = f"recurrent states: {size:.2f} MB a text" if size else ""
        return [note for note in (self.drafter.describe(), chain, states) if note]

    def end_warmup(self) -> None:
        """Forget the warm-up, unless the method keeps it, and prepare the model's shapes."""
        if not self.drafter.needs.warmup_memory:
            self.drafter.reset()
        limit = self.target.context_limit(1) or self._longest_text
        self.drafter.prepare(self.target, min(self._longest_text, limit))
        self._is_warm = True
        if prepared := str(self.target.shapes.preparation):
            print(prepared, file=sys.stderr, flush=True)

    def memory(self) -> dict[str, torch.Tensor]:
        return self.drafter.memory() if self.drafter.is_hot else {}

    def held_bytes(self) -> int:
        """Bytes that the drafter holds now, the last text's state included, and the model's own not."""
        return held_bytes(self.drafter, apart_from=self.target)


def print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def load_answerer(setup: Setup) -> MethodAnswerer:
    """Load the weights and make the method that answers with them.

    Raises:
        UserError: if the weights cannot be loaded, or the method does not fit the model.
    """
    return method_answerer(setup, load_target(setup.run.model, setup.model))


def method_answerer(setup: Setup, target: TargetModel) -> MethodAnswerer:
    """Return a method on a loaded model; a `UserError` if they do not fit each other."""
    assert isinstance(setup.method, Method), "referees are no drafters"
    drafter = make_drafter(
        setup.method, setup.config, target.vocab_size, target.device, setup.start_memory
    )
    run = setup.run
    return MethodAnswerer(
        target,
        drafter,
        run.sampling,
        eos_ids(setup, target),
        setup.longest_text,
        run.answers.batch_size,
        stop_of(setup),
    )


def eos_ids(setup: Setup, target: TargetModel) -> frozenset[int]:
    return eos_ids_of(target.model, setup.model.tokenizer) | setup.conversation.stop_ids


def stop_of(setup: Setup) -> StopStringCriteria | None:
    """Return the criterion of the run's stop strings; None if there are none."""
    with user_errors():
        return stop_criterion(setup.run.sampling.stop, setup.model.tokenizer, "")
