"""One question answered, turn by turn, as a row of an answer file."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from evaluation.answers.row import AnswerRow, Choice, Turn
from evaluation.questions.conversation import Conversation, Message, asked_ids
from evaluation.questions.questions import Question

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """The prompt of a turn."""

    token_ids: list[int]
    seed: int | None  # the draws of a choice begin with it; None: they go on


class BatchAnswerer(Protocol):
    """Answers several prompts at a time, each in a slot from 0 to `size` - 1."""

    size: int

    def ask(self, slot: int, prompt: Prompt) -> None:
        """Begin a turn in a free slot; an exception if its prompt cannot be answered."""
        ...

    def ended(self) -> list[tuple[int, Turn | Failure]]:
        """Go on until turns end; return these, or why they failed, by slot. Their slots are free again."""
        ...


class Answerer(Protocol):
    """A method on a loaded model; a subclass overrides what the method does beside answering."""

    # Answers where several questions are asked at a time; None: one by one.
    batch: BatchAnswerer | None = None

    def answer(self, prompt_ids: list[int]) -> Turn: ...

    def seed(self, seed: int) -> None:
        """Begin a choice: the draws that follow depend on `seed` alone."""
        return

    def begin_question(self) -> None:
        """Begin a question: a cold method forgets here."""
        return

    def lean(self) -> AbstractContextManager[None]:
        """Take as little memory as the method can for the same answers, within the context."""
        return nullcontext()

    def end_warmup(self) -> None:
        return

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the memory that the method keeps across questions."""
        return {}


class Asking(NamedTuple):
    """How questions are asked; `seed` is that of the first choice."""

    conversation: Conversation
    model_id: str = ""
    num_choices: int = 1
    seed: int = 0


class Failure(NamedTuple):
    """Why a question failed. The exception itself would keep the model's tensors alive."""

    error: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        logger.debug("a question failed", exc_info=error)
        return cls(f"{type(error).__name__}: {error}", isinstance(error, torch.OutOfMemoryError))


class Answered(NamedTuple):
    """The choices of a question, the turns before a failure included, and that failure."""

    choices: Sequence[Choice]
    failure: Failure | None


def turns_of(asking: Asking, question: Question) -> Generator[Prompt, Any, Answered]:
    """Yield the prompt of each turn of a question, and be sent its `Turn` or `Failure`, which ends the question."""
    conversation, choices = asking.conversation, list[Choice]()
    for index in range(asking.num_choices):
        seed: int | None = asking.seed + index
        history: list[Message] = []
        turns: list[Turn] = []
        result: Turn | Failure | None = None
        for turn, user in enumerate(question.turns):
            try:
                prompt_ids = asked_ids(conversation, question, turn, history)
            except Exception as error:  # the template's
                result = Failure.of(error)
                break
            result = yield Prompt(prompt_ids, seed)
            if isinstance(result, Failure):
                break
            turns.append(result)
            history.append(Message(user, conversation.text(result.token_ids)))
            seed = None
        if turns:
            texts = [message.assistant for message in history]
            choices.append(Choice.of_turns(index, texts, turns))
        if isinstance(result, Failure):
            return Answered(choices, result)
    return Answered(choices, None)


def answer_row(answerer: Answerer, asking: Asking, question: Question) -> AnswerRow:
    """Answer one question; a failure becomes a row with its cause, and the turns before it.

    If the device's memory does not suffice, the question is asked again in lean mode.
    """
    return row_of(answerer, asking, question, _answered(answerer, asking, question))


def row_of(answerer: Answerer, asking: Asking, question: Question, answered: Answered) -> AnswerRow:
    """Return the row of a question that was asked, or asked again in lean mode."""
    choices, failure = answered
    if failure is None or not failure.is_out_of_memory:
        error = failure and failure.error
        return AnswerRow.of_question(question, asking.model_id, choices, error)
    with answerer.lean():
        choices, again = _answered(answerer, asking, question)
    row = AnswerRow.of_question(question, asking.model_id, choices, again and again.error)
    return row.plus(retried_after=failure.error)


def _answered(answerer: Answerer, asking: Asking, question: Question) -> Answered:
    turns = turns_of(asking, question)
    result: Turn | Failure | None = None
    try:
        answerer.begin_question()
        while True:
            result = _result(answerer, turns.send(result))
    except StopIteration as end:
        answered: Answered = end.value
        return answered
    except Exception as error:  # the method's, before the first turn
        return Answered([], Failure.of(error))


def _result(answerer: Answerer, prompt: Prompt) -> Turn | Failure:
    try:
        if prompt.seed is not None:
            answerer.seed(prompt.seed)
        return answerer.answer(prompt.token_ids)
    except Exception as error:
        return Failure.of(error)
