"""One inference run: check everything, load, answer, report."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from evaluation.inference.config import RunConfig
from evaluation.inference.loop import answer_questions, record, report
from evaluation.inference.method import load_answerer, print_notes
from evaluation.inference.plan import Plan, check_asked, prepare
from model.commands.command_line import UserError
from model.commands.files import check_output
from model.commands.matrix_file import write_memory
from model.methods import Method


def answer_with_method(
    method: Method, run: RunConfig, config: Any, load_matrix: str | None, save_matrix: str | None
) -> int:
    """Answer a benchmark's questions with a method; return 1 if a question failed, else 0."""
    if save_matrix:
        check_output(save_matrix, "save_matrix")
    if save_matrix and run.uses_ray:
        raise UserError("save_matrix: got workers, which have a matrix each; leave one out")
    plan = prepare(check_asked(run), method, run, config, load_matrix, save_matrix)
    with closing(plan.log):
        if save_matrix or not plan.is_answered:
            memory = plan.memory()  # before the weights load: it may be missing
            if run.uses_ray:
                _answer_by_workers(plan, memory)
            else:
                _answer(plan, memory, save_matrix)
        plan.log.finish()
    return report([plan.log], " (--overwrite runs all again)")


def _answer_by_workers(plan: Plan, memory: dict[str, torch.Tensor] | None) -> None:
    from evaluation.inference import workers

    setup, log = plan.setup, plan.log
    if memory is not None and setup.run.worker_count > 1:
        print(
            "--state-order single: the matrix goes from question to question, so that one worker "
            "answers all",
            file=sys.stderr,
        )
    remaining = log.remaining(plan.questions)
    with workers.cluster(setup):
        log.begin()
        finished = workers.answer_by_workers(setup, remaining, memory)
        of_log = ((log, row) for row in finished)
        record(of_log, len(plan.questions), len(plan.questions) - len(remaining))


def _answer(plan: Plan, memory: dict[str, torch.Tensor] | None, save_matrix: str | None) -> None:
    setup = plan.setup
    answerer = load_answerer(setup)
    drafter = answerer.drafter
    plan.settle_threads(answerer.target)
    plan.note_kernels(answerer.target)
    print_notes(answerer.notes())
    plan.log.begin()
    answer_questions(
        answerer,
        setup.conversation,
        plan.questions,
        plan.log,
        model_id=setup.model_id,
        num_choices=setup.run.answers.num_choices,
        seed=setup.run.sampling.seed,
        num_warmup=setup.run.answers.warmup,
        restore=lambda: drafter.load_memory(memory) if memory else None,
    )
    plan.log.note(held_bytes=answerer.held_bytes())
    if save_matrix:
        write_memory(drafter, Path(save_matrix), setup.model.tokenizer)
