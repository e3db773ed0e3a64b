"""Questions become rows of answer files: turn by turn, one or several at a time, whoever answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow, Choice, Turn
from evaluation.questions.conversation import Conversation, Message, asked_ids
from evaluation.questions.questions import Question
from model.commands.command_line import FINISHING, Interrupt
from model.machine.timing import progress

logger = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """A turn of a question, as it is asked."""

    token_ids: list[int]  # none for a server, which is sent messages
    seed: int | None  # the draws of a choice begin with it; None: they go on
    question: Question
    choice: int
    turn: int
    answers: Sequence[str]  # to the turns before
    is_low_memory: bool = False  # asked again, since the device's memory did not suffice

    @property
    def begins_question(self) -> bool:
        """Whether nothing of its question was asked before: a cold method forgets here."""
        return self.choice == self.turn == 0


class Failure(NamedTuple):
    """Why a question failed. The exception itself would keep the model's tensors alive."""

    error: str
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, error: Exception) -> Failure:
        logger.debug("a question failed", exc_info=error)
        return cls(f"{type(error).__name__}: {error}", isinstance(error, torch.OutOfMemoryError))


# The answer to a turn, of a server as the figures of a row; or why there is none.
Result: TypeAlias = Turn | dict[str, Any] | Failure


class Answerer:
    """Whoever answers: a method, transformers' generate, llama.cpp or a server.

    Turns are asked in slots from 0 to `size` - 1. Here one is answered at a time, by `answer`.
    """

    size = 1

    def ask(self, slot: int, prompt: Prompt) -> None:
        """Begin a turn in a free slot; an exception if its prompt cannot be answered."""

    def ended(self, under_way: Mapping[int, Prompt]) -> Sequence[tuple[int, Result]]:
        """Go on until turns end; return these, or why they failed, by slot. Their slots are free again."""
        slot, prompt = next(iter(under_way.items()))
        try:
            return [(slot, self.answer(prompt))]
        except Exception as error:
            return [(slot, Failure.of(error))]

    def end_warmup(self) -> None:
        """Forget the warm-up."""

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the memory that is kept across questions."""
        return {}

    def answer(self, prompt: Prompt) -> Turn:
        """Answer a turn alone; with `is_low_memory`, in as little memory as gives the same answer."""
        raise NotImplementedError


class Asking(NamedTuple):
    """How questions are asked; `seed` is that of the first choice. A server has no conversation of ours."""

    conversation: Conversation | None
    model_id: str = ""
    num_choices: int = 1
    seed: int = 0


def rows_of(
    answerer: Answerer, asking: Asking, questions: Sequence[Question]
) -> Iterator[AnswerRow]:
    """Yield the row of each question as it is answered; one that fails has its cause.

    All slots are in use as long as questions wait. Between two rows our own models stand still.
    """
    waiting = deque(questions)
    asked: dict[int, Generator[Prompt, Result | None, AnswerRow]] = {}
    under_way: dict[int, Prompt] = {}

    def go_on(slot: int, result: Result | None) -> Iterator[AnswerRow]:
        """Ask a question's next turn, given the last one's result; yield its row if there is none."""
        while True:
            under_way.pop(slot, None)
            try:
                prompt = asked[slot].send(result)
            except StopIteration as end:
                del asked[slot]
                yield end.value
                return
            try:
                answerer.ask(slot, prompt)
                under_way[slot] = prompt
                return
            except Exception as error:
                result = Failure.of(error)

    while waiting or asked:
        while waiting and len(asked) < answerer.size:
            slot = next(slot for slot in range(answerer.size) if slot not in asked)
            asked[slot] = _turns_to_row(asking, waiting.popleft())
            yield from go_on(slot, None)
        if asked:
            for slot, result in answerer.ended(under_way):
                yield from go_on(slot, result)


def warm_up(answerer: Answerer, asking: Asking, question: Question, num_warmup: int) -> None:
    """Answer a question unmeasured, through the function of the measured ones; it fills all slots."""
    count = num_warmup and max(num_warmup, answerer.size)
    rows = list(rows_of(answerer, asking._replace(num_choices=1, seed=0), [question] * count))
    if error := next((row.error for row in rows if row.error), None):
        logger.warning("warm-up on question %s failed: %s", question.question_id, error)
    answerer.end_warmup()


def _turns_to_row(
    asking: Asking, question: Question
) -> Generator[Prompt, Result | None, AnswerRow]:
    """Yield the prompt of each turn of a question, be sent its result, and return the row.

    If the device's memory does not suffice, the question is asked again in low-memory mode.
    """
    model_id = asking.model_id
    try:
        choices, failure = yield from _turns(asking, question, is_low_memory=False)
        if failure is None or not failure.is_out_of_memory:
            error = failure and failure.error
            return AnswerRow.of_question(question, model_id, choices, error)
        choices, again = yield from _turns(asking, question, is_low_memory=True)
        row = AnswerRow.of_question(question, model_id, choices, again and again.error)
        return row.plus(retried_after=failure.error)
    except Exception as error:
        return AnswerRow.of_question(question, model_id, [], Failure.of(error).error)


def _turns(
    asking: Asking, question: Question, is_low_memory: bool
) -> Generator[Prompt, Result | None, tuple[list[Choice], Failure | None]]:
    """Yield prompts as above; return the choices, the turns before a failure included, and that failure."""
    conversation, choices = asking.conversation, list[Choice]()
    failure: Failure | None = None
    for choice in range(asking.num_choices):
        seed: int | None = asking.seed + choice
        texts: list[str] = []
        turns: list[Any] = []  # all of one type
        for turn in range(len(question.turns)):
            token_ids: list[int] = []
            if conversation is not None:
                history = [Message(*pair) for pair in zip(question.turns, texts, strict=False)]
                try:
                    token_ids = asked_ids(conversation, question, turn, history)
                except Exception as error:  # the template's
                    failure = Failure.of(error)
                    break
            result = yield Prompt(
                token_ids, seed, question, choice, turn, list(texts), is_low_memory
            )
            if isinstance(result, Failure):
                failure = result
                break
            turns.append(result)
            if isinstance(result, Turn):
                assert conversation is not None, "tokens need a template"
                texts.append(conversation.text(result.token_ids))
            elif result is not None:
                texts.append(result["turns"])
            seed = None
        if turns:
            choices.append(_choice(choice, texts, turns))
        if failure:
            break
    return choices, failure


def _choice(index: int, texts: Sequence[str], turns: Sequence[Any]) -> Choice:
    if isinstance(turns[0], Turn):
        return Choice.of_turns(index, texts, turns)
    keys = [key for key in turns[0] if all(key in turn for turn in turns)]
    values = {key: [turn[key] for turn in turns] for key in keys}
    if "accept_lengths" in values:  # of all turns in one list
        values["accept_lengths"] = list(chain.from_iterable(values["accept_lengths"]))
    return Choice.of({"index": index, **values})


class Finished(NamedTuple):
    """A question that was asked: its row, and the method's memory after it."""

    row: AnswerRow
    memory: dict[str, torch.Tensor]


def record(finished: Iterable[tuple[AnswerLog, Finished]], num_rows: int, num_done: int) -> None:
    """Append rows to their logs as they are finished, and show progress: `num_done` of `num_rows` exist already.

    The first Ctrl-C waits for the current question, whose row is written, the second does not. A `UserError` if a
    row cannot be written.
    """
    num_tokens = num_steps = 0
    seconds = 0.0
    with (
        Interrupt(FINISHING) as interrupt,
        progress(total=num_rows, initial=num_done, unit="answer") as bar,
    ):
        for log, (row, memory) in finished:
            log.append(row, memory)
            if row.error is not None:
                message = f"question {row.question_id} failed: {row.error}"
                bar.write(message, file=bar.fp)
            for choice in row.choices:
                num_tokens += sum(choice.new_tokens)
                num_steps += len(choice.accept_lengths)
                seconds += choice.seconds
            if num_steps and seconds:
                figures = f"{num_tokens / seconds:.1f} tokens/s, MAT {num_tokens / num_steps:.2f}"
                bar.set_postfix_str(figures, refresh=False)
            bar.update()
            if interrupt.is_noted:
                raise KeyboardInterrupt
