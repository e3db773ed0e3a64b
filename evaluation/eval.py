"""Answer questions: warm up, then every question, turn by turn, into the answer file.

`answer_questions` is the one loop of all inference commands. `run_eval` and `reorg_answer_file` are
the entry points of Spec-Bench's and TokenRecycling's own scripts, kept for code written against
them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import shortuuid
import torch
from tqdm import tqdm

from evaluation.answers import AnswerLog
from evaluation.conversation import Conversation, Message, choose_conversation
from evaluation.provenance import git_commit, versions
from evaluation.questions import Question, load_questions

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

    def end_warmup(self) -> None:
        """Forget what warm-up passes left behind."""
        ...

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what the method keeps across questions."""
        ...


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
    """Answer the questions that the log lacks, and append each to it.

    A question that fails is recorded with its cause, and the run goes on.

    Args:
        answerer: the method on its model.
        conversation: how turns become prompts.
        questions: all questions of the run.
        log: where answers go; says which are there already.
        model_id: name of the run in the rows.
        num_choices: answers to each question.
        seed: seed of the first choice.
        num_warmup: unmeasured passes over the first remaining question.
        restore: called between warm-up and the first question: loads saved memory.

    Returns:
        The number of questions that failed, those in the log before included.
    """
    remaining = [question for question in questions if question.question_id not in log.done]
    if remaining:
        _warm_up(answerer, conversation, remaining[0], num_warmup)
    restore()
    num_tokens = num_steps = 0
    seconds = 0.0
    with tqdm(
        total=len(questions), initial=len(questions) - len(remaining), unit="question"
    ) as bar:
        for question in remaining:
            try:
                choices = _answer(answerer, conversation, question, num_choices, seed)
                error = None
            except Exception as failure:
                logger.debug("question %s", question.question_id, exc_info=True)
                choices, error = [], f"{type(failure).__name__}: {failure}"
                tqdm.write(f"question {question.question_id} failed: {error}", file=bar.fp)
            row = {
                "question_id": question.question_id,
                "category": question.category,
                "answer_id": shortuuid.uuid(),
                "model_id": model_id,
                "choices": choices,
                "tstamp": time.time(),
            }
            log.append(row if error is None else {**row, "error": error}, answerer.memory())
            for choice in choices:
                num_tokens += sum(choice["new_tokens"])
                num_steps += len(choice["accept_lengths"])
                seconds += sum(choice["wall_time"])
            bar.update()
            if num_steps and seconds:
                bar.set_postfix_str(
                    f"{num_tokens / seconds:.1f} tokens/s, MAT {num_tokens / num_steps:.2f}"
                )
    return log.num_failed


def _warm_up(
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


class _ForwardFunction:
    """An `Answerer` over a Spec-Bench forward function.

    Such a function takes (inputs, model, tokenizer, max_new_tokens, **kwargs) and returns
    (output_ids [1, L], new_token, steps, accept_length_list).
    """

    def __init__(
        self, function: Callable, model: Any, tokenizer: Any, max_new_tokens: int, kwargs: Mapping
    ) -> None:
        self._function = function
        self._model = model
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._kwargs = dict(kwargs)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def begin_question(self) -> None: ...

    def end_warmup(self) -> None: ...

    def memory(self) -> dict[str, torch.Tensor]:
        return {}

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int]) -> Turn:
        from transformers import BatchEncoding

        ids = torch.tensor([prompt_ids], device=self._model.device)
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        start = time.perf_counter()
        output_ids, _, _, accept_lengths = self._function(
            inputs, self._model, self._tokenizer, self._max_new_tokens, **self._kwargs
        )
        seconds = time.perf_counter() - start
        new_ids = output_ids[0][len(prompt_ids) :].tolist()
        return Turn(new_ids, [int(length) for length in accept_lengths], seconds)


def run_eval(
    model: Any,
    tokenizer: Any,
    forward_func: Callable,
    model_id: str,
    question_file: str,
    question_begin: int | None,
    question_end: int | None,
    answer_file: str,
    max_new_tokens: int,
    num_choices: int,
    num_gpus_per_model: int,
    num_gpus_total: int,
    **kwargs: Any,
) -> int:
    """Answer questions with a Spec-Bench forward function; the signature is Spec-Bench's.

    Returns:
        The number of questions that failed.

    Raises:
        ValueError: if more than one worker is asked for.
        UserError: if questions or answer file cannot be used.
    """
    if num_gpus_total != num_gpus_per_model:
        raise ValueError(
            f"num_gpus_total: got {num_gpus_total} with num_gpus_per_model {num_gpus_per_model}; allowed: equal "
            "numbers, one worker a run"
        )
    questions = load_questions(Path(question_file), question_begin, question_end)
    name_or_path = getattr(model.config, "_name_or_path", "")
    conversation = choose_conversation("auto", name_or_path, tokenizer)
    meta = {
        "model_id": model_id,
        "model_path": name_or_path,
        "max_new_tokens": max_new_tokens,
        "forward_function": getattr(forward_func, "__name__", str(forward_func)),
        "options": {name: str(value) for name, value in kwargs.items()},
        "git_commit": git_commit(),
        "versions": versions(),
        "start_time": time.time(),
    }
    log = AnswerLog(Path(answer_file), meta)
    log.begin()
    answerer = _ForwardFunction(forward_func, model.eval(), tokenizer, max_new_tokens, kwargs)
    try:
        return answer_questions(
            answerer, conversation, questions, log, model_id=model_id, num_choices=num_choices
        )
    finally:
        log.finish()


def reorg_answer_file(answer_file: str) -> None:
    """Sort an answer file by question id and keep the last answer of each, as Spec-Bench's function
    does.
    """
    file = Path(answer_file)
    rows = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            rows[json.loads(line)["question_id"]] = line.rstrip("\n") + "\n"
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(rows[key] for key in sorted(rows)), encoding="utf-8")
    os.replace(temporary, file)
