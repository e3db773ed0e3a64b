"""Questions answered one after the other, as rows of an answer file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from evaluation.answers.row import AnswerRow
from evaluation.inference.question import Answerer, Asking, answer, answer_row
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question

logger = logging.getLogger(__name__)


def rows_of(
    answerer: Answerer, asking: Asking, questions: Sequence[Question]
) -> Iterator[AnswerRow]:
    """Yield the row of each question; one that fails has its cause."""
    for question in questions:
        yield answer_row(answerer, asking, question)


def warm_up(
    answerer: Answerer, conversation: Conversation, question: Question, num_warmup: int
) -> None:
    """Answer a question unmeasured, through the same function as the measured ones."""
    for _ in range(num_warmup):
        try:
            answer(answerer, Asking(conversation), question)
        except Exception as failure:
            logger.warning("warm-up on question %s failed: %s", question.question_id, failure)
            break
    answerer.end_warmup()
