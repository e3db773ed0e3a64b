"""One inference run: check everything, load, answer, report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from evaluation.answering.config import RunConfig
from evaluation.answering.loop import answer_questions, record
from evaluation.answering.method import MethodAnswerer, load_answerer
from evaluation.answering.plan import Plan, check_asked, prepare
from model.commands.command_line import UserError
from model.commands.files import check_output
from model.commands.matrix_file import write_memory
from model.methods.registry import Method


def answer_with_method(
    method: Method, run: RunConfig, config: Any, load_matrix: str | None, save_matrix: str | None
) -> int:
    """Answer a benchmark's questions with a method.

    Returns:
        0, or 1 if a question failed.

    Raises:
        UserError: if something given cannot be used.
    """
    if save_matrix:
        check_output(save_matrix, "save_matrix")
    if save_matrix and run.uses_ray:
        raise UserError("save_matrix: got workers, which have a matrix each; leave one out")
    plan = prepare(check_asked(run), method, run, config, load_matrix, save_matrix)
    try:
        if save_matrix or not plan.is_answered:
            memory = plan.memory()  # before the weights load: it may be missing
            if run.uses_ray:
                _answer_by_workers(plan, memory)
            else:
                answerer = load_answerer(plan.setup)
                plan.settle_threads(answerer.target)
                plan.note_kernels(answerer.target)
                print("".join(note + "\n" for note in answerer.notes()), end="", file=sys.stderr)
                _answer(plan, answerer, memory)
                if save_matrix:
                    write_memory(answerer.drafter, Path(save_matrix))
            plan.log.finish()
        elif not plan.log.is_finished:  # interrupted after its last answer
            plan.log.finish()
    finally:
        plan.log.close()
    num_failed = plan.log.num_failed
    failed = (
        f"; {num_failed} failed, with their cause (--overwrite runs all again)"
        if num_failed
        else ""
    )
    print(f"{plan.log.num_rows} answers in {plan.log.file}{failed}")
    return 1 if num_failed else 0


def _answer_by_workers(plan: Plan, memory: dict[str, torch.Tensor] | None) -> None:
    from evaluation.answering import workers

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


def _answer(plan: Plan, answerer: MethodAnswerer, memory: dict[str, torch.Tensor] | None) -> None:
    log, setup = plan.log, plan.setup
    run, drafter = setup.run, answerer.drafter

    def restore() -> None:
        if memory:
            drafter.load_memory(memory)

    log.begin()
    answer_questions(
        answerer,
        setup.conversation,
        plan.questions,
        log,
        model_id=setup.model_id,
        num_choices=run.answers.num_choices,
        seed=run.sampling.seed,
        num_warmup=run.answers.warmup,
        restore=restore,
    )
