"""Spec-Bench's entry points, `run_eval` and `reorg_answer_file`, for code written against them.

Both go through the loop of all inference commands (`inference/answering.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import git_commit
from evaluation.answers.row import Turn
from evaluation.inference.answering import (
    Answerer,
    Asking,
    Finished,
    Prompt,
    record,
    rows_of,
    warm_up,
)
from evaluation.questions.conversation import check_system, choose_conversation
from evaluation.questions.questions import Question, load_questions
from model.commands.files import file_hash, write_whole
from model.machine.packages import versions

__all__ = (
    "Answerer",
    "Finished",
    "Turn",
    "answer_questions",
    "record",
    "reorg_answer_file",
    "run_eval",
)


@dataclass(frozen=True)
class _ForwardFunction(Answerer):
    """Answers with a Spec-Bench forward function.

    Such a function takes (inputs, model, tokenizer, max_new_tokens, **kwargs) and returns
    (output_ids [1, L], new_token, steps, accept_length_list).
    """

    function: Callable
    model: Any
    tokenizer: Any
    max_new_tokens: int
    kwargs: Mapping[str, Any]

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> Turn:
        from transformers import BatchEncoding

        prompt_ids = prompt.token_ids
        if prompt.seed is not None:
            torch.manual_seed(prompt.seed)
        ids = torch.tensor([prompt_ids], device=self.model.device)
        inputs = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        start = time.perf_counter()
        output_ids, _, _, accept_lengths = self.function(
            inputs, self.model, self.tokenizer, self.max_new_tokens, **self.kwargs
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
    """Answer questions with a Spec-Bench forward function; return how many failed. The signature is Spec-Bench's.

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
    check_system(conversation, questions, name_or_path)
    meta = {
        "model_id": model_id,
        "model_path": name_or_path,
        "max_new_tokens": max_new_tokens,
        "num_choices": num_choices,
        "question_file_sha256": file_hash(Path(question_file)),
        "question_file_name": Path(question_file).name,
        "conv_template": conversation.name,
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
        "device": str(getattr(model, "device", "")),
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
        answer_questions(answerer, Asking(conversation, model_id, num_choices), questions, log)
        log.finish()
    finally:
        log.close()
    return log.num_failed


def answer_questions(
    answerer: Answerer,
    asking: Asking,
    questions: Sequence[Question],
    log: AnswerLog,
    num_warmup: int = 3,
) -> None:
    """Answer the questions that the log lacks; one that fails is recorded with its cause, and the run goes on."""
    remaining = log.remaining(questions)
    if remaining:
        warm_up(answerer, asking, remaining[0], num_warmup)
    rows = rows_of(answerer, asking, remaining)
    finished = ((log, Finished(row, answerer.memory())) for row in rows)
    record(finished, len(questions), len(questions) - len(remaining))


def reorg_answer_file(answer_file: str) -> None:
    """Sort an answer file by question id and keep the last answer of each, as Spec-Bench's function
    does.
    """
    file = Path(answer_file)
    rows = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            rows[json.loads(line)["question_id"]] = line.rstrip("\n") + "\n"
    write_whole(file, "".join(rows[key] for key in sorted(rows)))
