"""Questions answered one after the other, or several at a time, as rows of an answer file."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from evaluation.answers.row import AnswerRow, Turn
from evaluation.inference.question import (
    Answered,
    Answerer,
    Asking,
    BatchAnswerer,
    Failure,
    Prompt,
    answer_row,
    row_of,
    turns_of,
)
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question

logger = logging.getLogger(__name__)


def rows_of(
    answerer: Answerer, asking: Asking, questions: Sequence[Question]
) -> Iterator[AnswerRow]:
    """Yield the row of each question as it is answered; one that fails has its cause.

    A batch is full as long as questions wait. Between two rows it stands still.
    """
    if answerer.batch is None:
        for question in questions:
            yield answer_row(answerer, asking, question)
    else:
        yield from _BatchRun(answerer, answerer.batch, asking).rows(questions)


class _BatchRun:
    """Questions under way in the slots of a batch."""

    def __init__(self, answerer: Answerer, batch: BatchAnswerer, asking: Asking) -> None:
        self._answerer, self._batch, self._asking = answerer, batch, asking
        self._under_way: dict[int, tuple[Question, Generator[Prompt, Any, Answered]]] = {}

    def rows(self, questions: Sequence[Question]) -> Iterator[AnswerRow]:
        waiting = deque(questions)
        while waiting or self._under_way:
            while waiting and (free := self._free_slots()):
                question = waiting.popleft()
                self._under_way[free[0]] = question, turns_of(self._asking, question)
                yield from self._go_on(free[0], None)
            if self._under_way:
                for slot, result in self._batch.ended():
                    yield from self._go_on(slot, result)

    def _free_slots(self) -> list[int]:
        return [slot for slot in range(self._batch.size) if slot not in self._under_way]

    def _go_on(self, slot: int, result: Turn | Failure | None) -> Iterator[AnswerRow]:
        """Ask a question's next turn, given the last one's result; yield its row if there is none."""
        question, turns = self._under_way[slot]
        while True:
            try:
                prompt = turns.send(result)
            except StopIteration as end:
                answered = end.value
                break
            except Exception as error:
                answered = Answered([], Failure.of(error))
                break
            try:
                self._batch.ask(slot, prompt)
                return
            except Exception as error:
                result = Failure.of(error)
        del self._under_way[slot]
        yield row_of(self._answerer, self._asking, question, answered)


def warm_up(
    answerer: Answerer, conversation: Conversation, question: Question, num_warmup: int
) -> None:
    """Answer a question unmeasured, through the same function as the measured ones; a batch is filled with it."""
    size = answerer.batch.size if answerer.batch else 1
    count = num_warmup and max(num_warmup, size)
    rows = list(rows_of(answerer, Asking(conversation), [question] * count))
    if error := next((row.error for row in rows if row.error), None):
        logger.warning("warm-up on question %s failed: %s", question.question_id, error)
    answerer.end_warmup()
