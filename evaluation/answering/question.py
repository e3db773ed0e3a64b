"""One question answered, turn by turn, as a row of an answer file."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import shortuuid
import torch

from evaluation.answers.rows import Row
from evaluation.questions.conversation import Conversation, Message
from evaluation.questions.questions import Question

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to one turn.

    Attributes:
        token_ids: new tokens, the one that ended the text included.
        accept_lengths: tokens emitted by each step; they sum to the number of new tokens.
        wall_time: seconds for prompt and answer, tokenisation excluded.
        details: further per-turn figures for the answer file, such as prefill_time.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    wall_time: float
    details: dict[str, Any] = field(default_factory=dict)


class Answerer(Protocol):
    """A method on a loaded model."""

    def seed(self, seed: int) -> None:
        """Begin a choice: the draws that follow depend on `seed` alone."""
        ...

    def begin_question(self) -> None:
        """Begin a question: a cold method forgets here."""
        ...

    def answer(self, prompt_ids: list[int]) -> Turn:
        """Answer one prompt."""
        ...

    def lean(self) -> AbstractContextManager[None]:
        """Take as little memory as the method can, to give the same answers, for a while."""
        ...

    def end_warmup(self) -> None:
        """Forget what warm-up passes left behind."""
        ...

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what the method keeps across questions."""
        ...


def answer_row(
    answerer: Answerer,
    conversation: Conversation,
    question: Question,
    *,
    model_id: str,
    num_choices: int,
    seed: int,
) -> Row:
    """Answer one question; a failure becomes a row with its cause.

    Where the device's memory does not suffice, the question is asked once more in a leaner way.
    """
    choices, error, is_out_of_memory = _try(answerer, conversation, question, num_choices, seed)
    row = make_row(question, model_id, choices, error)
    if is_out_of_memory:
        with answerer.lean():
            choices, again, _ = _try(answerer, conversation, question, num_choices, seed)
        row = {**make_row(question, model_id, choices, again), "retried_after": error}
    return row


def make_row(
    question: Question, model_id: str, choices: list[dict[str, Any]], error: str | None
) -> Row:
    """Return a row of an answer file."""
    row = {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": shortuuid.uuid(),
        "model_id": model_id,
        "choices": choices,
        "tstamp": time.time(),
    }
    return row if error is None else {**row, "error": error}


class _Attempt(NamedTuple):
    """Choices, or why there are none; the exception itself would keep the model's tensors alive."""

    choices: list[dict[str, Any]]
    error: str | None = None
    is_out_of_memory: bool = False


def _try(
    answerer: Answerer, conversation: Conversation, question: Question, num_choices: int, seed: int
) -> _Attempt:
    try:
        return _Attempt(_answer(answerer, conversation, question, num_choices, seed))
    except Exception as failure:
        logger.debug("question %s", question.question_id, exc_info=True)
        is_out_of_memory = isinstance(failure, torch.OutOfMemoryError)
        return _Attempt([], f"{type(failure).__name__}: {failure}", is_out_of_memory)


def warm_up(
    answerer: Answerer, conversation: Conversation, question: Question, num_warmup: int
) -> None:
    """Answer a question unmeasured, through the same function as the measured ones."""
    for _ in range(num_warmup):
        try:
            _answer(answerer, conversation, question, 1, 0)
        except Exception as failure:
            logger.warning("warm-up on question %s failed: %s", question.question_id, failure)
            break
    answerer.end_warmup()


def _answer(
    answerer: Answerer, conversation: Conversation, question: Question, num_choices: int, seed: int
) -> list[dict[str, Any]]:
    """Return the choices of one question in Spec-Bench's form."""
    choices = []
    answerer.begin_question()
    for index in range(num_choices):
        answerer.seed(seed + index)
        history: list[Message] = []
        turns: list[Turn] = []
        for user in question.turns:
            turns.append(answerer.answer(conversation.prompt_ids(history, user)))
            history.append(Message(user, conversation.text(turns[-1].token_ids)))
        choice = {
            "index": index,
            "turns": [message.assistant for message in history],
            "decoding_steps": [len(turn.accept_lengths) for turn in turns],
            "new_tokens": [len(turn.token_ids) for turn in turns],
            "wall_time": [turn.wall_time for turn in turns],
            "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
            "token_ids": [turn.token_ids for turn in turns],
        }
        for name in turns[0].details:
            choice[name] = [turn.details[name] for turn in turns]
        choices.append(choice)
    return choices
