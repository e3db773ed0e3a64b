"""The one loop of all inference commands: warm up, then answer every question, into the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.row import AnswerRow
from evaluation.inference.question import Answerer, Asking
from evaluation.inference.rows import rows_of, warm_up
from evaluation.questions.conversation import Conversation
from evaluation.questions.questions import Question
from model.commands.command_line import FINISHING, Interrupt
from model.machine.timing import progress


class Finished(NamedTuple):
    """A question that was asked: its row, and the method's memory after it."""

    row: AnswerRow
    memory: dict[str, torch.Tensor]


def answer_questions(
    answerer: Answerer,
    conversation: Conversation,
    questions: Sequence[Question],
    log: AnswerLog,
    *,
    model_id: str,
    num_choices: int = 1,
    seed: int = 0,
    num_warmup: int = 3,
    restore: Callable[[], None] = lambda: None,
) -> int:
    """Answer the questions that the log lacks; return how many failed, those in the log before included.

    A question that fails is recorded with its cause, and the run goes on. `restore` is called between
    the warm-up and the first question: it loads saved memory. `seed` is that of the first choice.
    """
    asking = Asking(conversation, model_id, num_choices, seed)
    remaining = log.remaining(questions)
    if remaining:
        warm_up(answerer, conversation, remaining[0], num_warmup)
    restore()

    def finished() -> Iterator[tuple[AnswerLog, Finished]]:
        for row in rows_of(answerer, asking, remaining):
            yield log, Finished(row, answerer.memory())

    record(finished(), len(questions), len(questions) - len(remaining))
    return log.num_failed


def record(finished: Iterable[tuple[AnswerLog, Finished]], num_rows: int, num_done: int) -> None:
    """Append rows to their logs as they are finished, and show progress.

    The first Ctrl-C waits for the current question, the second does not.

    Args:
        finished: rows, each with the log that it belongs to.
        num_rows: of all logs, when the run is done.
        num_done: of these, rows that exist already.

    Raises:
        KeyboardInterrupt: once the row is written.
        UserError: if a row cannot be written.
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


def report(logs: Sequence[AnswerLog], advice: str = "") -> int:
    """Print a line for each log; return 1 if a question failed, else 0.

    `advice` follows the number of failed questions.
    """
    for log in logs:
        failed = f"; {log.num_failed} failed, with their cause{advice}" if log.num_failed else ""
        print(f"{log.num_rows} answers in {log.file}{failed}")
    return int(any(log.num_failed for log in logs))
