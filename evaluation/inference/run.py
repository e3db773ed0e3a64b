"""A run: the questions are answered by every participant in turn, one after the other or as many as a batch holds.

An inference command is a run of one participant. In a comparison one loaded model serves all: wall-clock figures of
separate processes drift with the machine, but here a slow minute slows all participants, the baseline included, and
ratios stay. Every participant has its own memory, answer file and sidecar, as its inference command writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import shortuuid

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import BASELINE, NOISE_FLOOR
from evaluation.answers.row import AnswerRow
from evaluation.inference.answering import Answerer, Finished, record, rows_of, warm_up
from evaluation.inference.config import RunConfig
from evaluation.inference.method import BatchedMethod, MethodAnswerer, held_bytes
from evaluation.inference.plan import (
    Memory,
    OtherProgram,
    Participant,
    Plan,
    check_asked,
    model_answers,
    prepare,
    questions_asked,
    settle_threads,
)
from model.backends.target import TargetModel
from model.commands.command_line import UserError
from model.commands.files import check_output
from model.commands.loading import CheckedModel, load_target, write_memory
from model.commands.model_options import ModelOptions
from model.kernels.short_pass import short_pass_kernel

T = TypeVar("T")
Load = Callable[[ModelOptions, CheckedModel], TargetModel]


def in_turn(participants: Sequence[T], num_parts: int) -> Iterator[tuple[int, T]]:
    """Yield the index of every part of the questions with every participant; each follows each other equally often.

    The participant before leaves its data in the processor's caches: under one fixed order the same
    participant would always profit. The orders are E. J. Williams's (Experimental designs balanced for the
    estimation of residual effects of treatments, 1949).
    """
    count = len(participants)
    places = [0, *((1 + step // 2) * (1 if step % 2 == 0 else -1) for step in range(count - 1))]
    for index in range(num_parts):
        order = [participants[(place + index) % count] for place in places]
        is_reversed = count % 2 and (index // count) % 2
        for participant in reversed(order) if is_reversed else order:
            yield index, participant


def answer_with_method(
    participant: Participant, run: RunConfig, load_matrix: str | None, save_matrix: str | None
) -> int:
    """Answer a benchmark's questions with a method; return 1 if a question failed, else 0."""
    if save_matrix:
        check_output(save_matrix, "save_matrix")
    if save_matrix and run.uses_ray:
        raise UserError("save_matrix: got workers, which have a matrix each; leave one out")
    plan = prepare(check_asked(run), participant, run, load_matrix, save_matrix)
    answer([[plan]], Path(save_matrix) if save_matrix else None)
    return report([plan.log], " (--overwrite runs all again)")


def compare_methods(
    participants: Sequence[Participant],
    run: RunConfig,
    folder: str | None = None,
    name: str | None = None,
    num_runs: int = 1,
    load: Load | None = None,
) -> int:
    """Answer a benchmark's questions with all participants in turn; the baseline answers twice.

    The answer files lie in `folder` (None: the benchmark's) and their names begin with `name` (None: the
    model's). `load` returns the model on its device; who has it there already hands it in. Returns 1 if a
    question failed, else 0.
    """
    participants = [*participants, replace(participants[0], is_again=True)]
    for participant in participants:
        if isinstance(participant.method, OtherProgram):
            participant.method.check(run, participant.config)
    has_model = not all(participant.is_served for participant in participants)
    if not has_model and run.questions.prompt_tokens:
        raise UserError(
            f"prompt_tokens: got {run.questions.prompt_tokens} with servers only, whose tokenizer is not known"
        )
    asked = check_asked(run) if has_model else questions_asked(run)
    folder = str(folder or model_answers(run.questions))
    name = name or (Path(run.model.model_path).resolve().name if has_model else "served")
    together = {
        "interleaved_with": [participant.label for participant in participants],
        "interleaved_run": shortuuid.uuid(),
    }
    runs: list[list[Plan]] = []
    with ExitStack() as logs:
        for number in range(1, num_runs + 1):
            suffix = "" if num_runs == 1 else f"-run-{number}"
            runs.append([])
            for participant in participants:
                role = NOISE_FLOOR if participant.is_again else None
                if participant.is_served and participant is participants[0]:
                    role = BASELINE
                about: dict[str, Any] = together | ({"role": role} if role else {})
                parts = [f"{folder}/{name}", participant.label]
                if asked.model and not participant.is_served:
                    parts.append(str(asked.model.dtype).removeprefix("torch."))
                file = Path("-".join((*parts, *conditions_in_names(run))) + f"{suffix}.jsonl")
                if isinstance(participant.method, OtherProgram):
                    about |= participant.method.circumstances()
                plan = prepare(asked, participant, run.into(file), circumstances=about)
                logs.callback(plan.log.close)
                runs[-1].append(plan)
        answer(runs, load=load)
    return report([plan.log for plans in runs for plan in plans])


def conditions_in_names(run: RunConfig) -> list[str]:
    """Return the conditions that names of answer files tell."""
    size = run.answers.batch_size
    batch = [f"batch-{size}"] * (size > 1)
    return [f"temp-{run.sampling.temperature}", str(run.sampling.max_new_tokens), *batch]


def answer(
    runs: Sequence[Sequence[Plan]], save_matrix: Path | None = None, load: Load | None = None
) -> None:
    """Answer what the logs lack, run by run, and finish them.

    `load` is as of `compare_methods`. The memory of an inference command's method is saved to `save_matrix`.
    """
    plans = list(chain.from_iterable(runs))
    with ExitStack() as logs:
        for plan in plans:
            logs.callback(plan.log.close)
        if save_matrix or any(plan.remaining for plan in plans):
            _answer(runs, save_matrix, load or load_target)
        for plan in plans:
            plan.log.finish()


def report(logs: Sequence[AnswerLog], advice: str = "") -> int:
    """Print a line for each log; return 1 if a question failed, else 0."""
    for log in logs:
        failed = f"; {log.num_failed} failed, with their cause{advice}" if log.num_failed else ""
        print(f"{log.num_rows} answers in {log.file}{failed}")
    return int(any(log.num_failed for log in logs))


def _answer(runs: Sequence[Sequence[Plan]], save_matrix: Path | None, load: Load) -> None:
    """Load the model, if one decodes with it, and answer the questions that the logs lack."""
    plans = list(chain.from_iterable(runs))
    for of_run in runs:
        _warn_of_earlier_answers(of_run)
    # Before the weights load: one may be missing.
    memories = [plan.memory() if save_matrix or plan.remaining else None for plan in plans]
    (first, *_), num_rows = plans, sum(len(plan.asked.questions) for plan in plans)
    num_done = num_rows - sum(len(plan.remaining) for plan in plans)
    if first.run.uses_ray:
        from evaluation.inference import workers

        with workers.cluster(first):
            first.log.begin()
            rows = workers.answer_by_workers(first, first.remaining, memories[0])
            record(((first.log, row) for row in rows), num_rows, num_done)
        return
    target = None
    if first.asked.model is not None:
        target = load(first.run.model, first.asked.model)
        local = [plan for plan in plans if not plan.participant.is_served]
        settle_threads(local, target)
        for plan in local:  # transformers uses no kernels of ours
            plan.log.note(lacks_kernels=target.lacks_kernels)
            if not isinstance(plan.participant.method, OtherProgram):
                build = short_pass_kernel() if target.linear_kernels else None
                plan.log.note(kernel_names=target.kernel_names, kernel_build=build)
    left = iter(memories)
    for of_run in runs:
        given = zip(of_run, left, strict=False)
        entries = [
            _ready(plan, target, memory, is_alone=len(of_run) == 1)
            for plan, memory in given
            if save_matrix or plan.remaining
        ]
        num_left = sum(len(plan.remaining) for plan in of_run)
        record(_rows(entries), num_rows, num_done)
        num_done += num_left
        for plan, answerer, _ in entries:
            if isinstance(answerer, MethodAnswerer):
                held = held_bytes(answerer.drafter, apart_from=answerer.target)
                plan.log.note(held_bytes=held, kernel_names=answerer.target.kernel_names)
                if save_matrix:
                    write_memory(answerer.drafter, save_matrix, plan.model.tokenizer)
        entries.clear()  # processes of other programs end before those of the next run begin


def _warn_of_earlier_answers(plans: Sequence[Plan]) -> None:
    """Warn if some participants have more answers than others: these were not measured in turn."""
    done = [len(plan.log.done) for plan in plans]
    most = min(done) + plans[0].run.answers.batch_size
    if max(done) > most:
        ahead = [
            plan.log.file.stem for plan, count in zip(plans, done, strict=True) if count > most
        ]
        print(
            f"WARNING: answers of {', '.join(ahead)} exist already, and were not measured in turn with "
            "those to come; --overwrite measures all of them again",
            file=sys.stderr,
        )


class _Entry(NamedTuple):
    """A participant that is ready, and its rows to come."""

    plan: Plan
    answerer: Answerer
    rows: Iterator[AnswerRow]


def answerer_of(plan: Plan, target: TargetModel | None) -> Answerer:
    """Return who answers, on the loaded model where there is one; a `UserError` if they do not fit each other."""
    if isinstance(plan.participant.method, OtherProgram):
        return plan.participant.method.answerer(plan, target)
    assert target is not None, "a method needs a model"
    is_alone = plan.run.answers.batch_size == 1
    return MethodAnswerer(plan, target) if is_alone else BatchedMethod(plan, target)


def _ready(plan: Plan, target: TargetModel | None, memory: Memory | None, is_alone: bool) -> _Entry:
    """Return a participant after warm-up, with the memory of its earlier answers; its file is begun."""
    answerer, asking, remaining = answerer_of(plan, target), plan.asking, plan.remaining
    if isinstance(answerer, MethodAnswerer):
        for note in answerer.notes():
            print(note, file=sys.stderr)
    if remaining:
        warm_up(answerer, asking, remaining[0], plan.run.answers.warmup)
    if memory and isinstance(answerer, MethodAnswerer):
        answerer.drafter.load_memory(memory)
    plan.log.begin()
    # A server rests while others answer: what it was asked in its turn has ended then.
    rests = plan.participant.is_served and not is_alone
    size = plan.run.answers.batch_size if rests else max(1, len(remaining))
    parts = (remaining[begin : begin + size] for begin in range(0, len(remaining), size))
    rows = chain.from_iterable(rows_of(answerer, asking, part) for part in parts)
    return _Entry(plan, answerer, rows)


def _rows(entries: Sequence[_Entry]) -> Iterator[tuple[AnswerLog, Finished]]:
    """Yield every missing row of a run with its log.

    A participant answers as many questions in turn as it has under way; where its batch then stands still,
    the texts that have not ended go on in its next turn. A server's have ended by then.
    """
    if not entries:  # all answers are there
        return
    questions, size = entries[0].plan.asked.questions, entries[0].plan.run.answers.batch_size
    parts = [questions[begin : begin + size] for begin in range(0, len(questions), size)]
    for index, (plan, answerer, rows) in in_turn(entries, len(parts)):
        for row in islice(rows, len(plan.log.remaining(parts[index]))):
            yield plan.log, Finished(row, answerer.memory())
