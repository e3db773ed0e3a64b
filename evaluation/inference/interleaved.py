"""A comparison: one loaded model, every question, or as many as a batch holds, answered by every entrant in turn.

Wall-clock figures of separate processes drift with the machine. Here a slow minute slows all
entrants, the baseline included, and ratios stay. Every entrant has its own memory, answer file and
sidecar, as its inference command writes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import shortuuid
import torch

from evaluation.answers.log import AnswerLog
from evaluation.answers.record import NOISE_FLOOR
from evaluation.answers.row import AnswerRow
from evaluation.inference.config import RunConfig
from evaluation.inference.entrants import Entrant, baseline_again
from evaluation.inference.loop import Finished, record, report
from evaluation.inference.method import (
    MethodAnswerer,
    eos_ids,
    method_answerer,
    print_notes,
    stop_of,
)
from evaluation.inference.plan import Asked, Plan, check_asked, model_answers, prepare
from evaluation.inference.question import Answerer
from evaluation.inference.referees import BATCHES, Referee, RefereeAnswerer, generate_settings
from evaluation.inference.rows import rows_of, warm_up
from model.commands.command_line import UserError
from model.commands.loading import CheckedModel, load_target
from model.commands.model_options import ModelOptions
from model.engine.target import TargetModel

T = TypeVar("T")
Memory = dict[str, torch.Tensor] | None


def in_turn(entrants: Sequence[T], num_parts: int) -> Iterator[tuple[int, T]]:
    """Yield the index of every part of the questions with every entrant, in orders in which each follows each other
    equally often.

    The entrant before leaves its data in the processor's caches: under one fixed order the same
    entrant would always profit. The orders are E. J. Williams's (Experimental designs balanced for the
    estimation of residual effects of treatments, 1949).
    """
    count = len(entrants)
    places = [0, *((1 + step // 2) * (1 if step % 2 == 0 else -1) for step in range(count - 1))]
    for index in range(num_parts):
        order = [entrants[(place + index) % count] for place in places]
        is_reversed = count % 2 and (index // count) % 2
        for entrant in reversed(order) if is_reversed else order:
            yield index, entrant


def compare_methods(
    entrants: Sequence[Entrant],
    run: RunConfig,
    folder: str | None = None,
    name: str | None = None,
    num_runs: int = 1,
    load: Callable[[ModelOptions, CheckedModel], TargetModel] = load_target,
) -> int:
    """Answer a benchmark's questions with all entrants in turn; the baseline answers twice.

    The answer files lie in `folder` (None: the benchmark's) and their names begin with `name` (None: the
    model's). `load` returns the model on its device; who has it there already hands it in. Returns 1 if a
    question failed, else 0.
    """
    entrants = [*entrants, baseline_again(entrants)]
    for entrant in entrants:
        if isinstance(entrant.method, Referee):
            entrant.method.check(run.sampling, run.answers.batch_size)
    asked = check_asked(run)
    start = f"{folder or model_answers(run.questions)}/{name or asked.model_name}"
    together = {
        "interleaved_with": [entrant.label for entrant in entrants],
        "interleaved_run": shortuuid.uuid(),
    }
    runs: list[list[Plan]] = []
    with ExitStack() as logs:
        for number in range(1, num_runs + 1):
            suffix = "" if num_runs == 1 else f"-run-{number}"
            runs.append([])
            for entrant in entrants:
                plan = _plan(asked, entrant, run, start, suffix, together)
                logs.callback(plan.log.close)
                runs[-1].append(plan)
        plans = [plan for plans in runs for plan in plans]
        if not all(plan.is_answered for plan in plans):
            _answer(asked, runs, load)
        for plan in plans:
            plan.log.finish()
        return report([plan.log for plan in plans])


def _plan(
    asked: Asked,
    entrant: Entrant,
    run: RunConfig,
    start: str,
    suffix: str,
    together: Mapping[str, Any],
) -> Plan:
    dtype = str(asked.model.dtype).removeprefix("torch.")
    size = run.answers.batch_size
    facts = [f"temp-{run.sampling.temperature}", str(run.sampling.max_new_tokens)]
    facts += [f"batch-{size}"] * (size > 1)
    file = "-".join((start, entrant.label, dtype, *facts)) + suffix
    answers = replace(run.answers, model_id=Path(file).name, answer_file=f"{file}.jsonl")
    role = {"role": NOISE_FLOOR} if entrant.is_again else {}
    return prepare(
        asked,
        entrant.method,
        replace(run, answers=answers),
        entrant.config,
        circumstances={**together, **role},
    )


def _answer(
    asked: Asked,
    runs: Sequence[Sequence[Plan]],
    load: Callable[[ModelOptions, CheckedModel], TargetModel],
) -> None:
    """Load the model and answer the questions that the logs lack."""
    plans = [plan for plans in runs for plan in plans]
    for of_run in runs:
        _warn_of_earlier_answers(of_run)
    # Before the weights load: one may be missing.
    memories = {plan.setup.model_id: plan.memory() for plan in plans if not plan.is_answered}
    target = load(plans[0].setup.run.model, asked.model)
    _settle_threads(plans, target)
    for plan in plans:
        plan.note_kernels(target)
    num_rows = len(asked.questions) * len(plans)
    num_done = sum(len(plan.questions) - len(plan.log.remaining(plan.questions)) for plan in plans)
    record(_finished(asked, runs, target, memories), num_rows, num_done)


def _warn_of_earlier_answers(plans: Sequence[Plan]) -> None:
    """Warn if some entrants have more answers than others: these were not measured in turn."""
    done = [len(plan.log.done) for plan in plans]
    most = min(done) + plans[0].setup.run.answers.batch_size
    if max(done) > most:
        ahead = [
            plan.setup.model_id for plan, count in zip(plans, done, strict=True) if count > most
        ]
        print(
            f"WARNING: answers of {', '.join(ahead)} are there already, and were not measured in turn with "
            "those that follow; --overwrite measures all anew",
            file=sys.stderr,
        )


def _settle_threads(plans: Sequence[Plan], target: TargetModel) -> None:
    known = sorted({plan.threads for plan in plans if plan.threads})
    if len(known) > 1:
        raise UserError(
            f"threads: answers that are there were made with {' and '.join(map(str, known))}; give --overwrite"
        )
    if not known:
        plans[0].settle_threads(target)
    for plan in plans:
        plan.note_threads()


def _finished(
    asked: Asked,
    runs: Sequence[Sequence[Plan]],
    target: TargetModel,
    memories: Mapping[str, Memory],
) -> Iterator[tuple[AnswerLog, Finished]]:
    """Yield every missing row with its log, run by run, each with drafters of its own.

    An entrant answers as many questions in turn as it has under way; where its batch then stands still, the texts
    that have not ended go on in its next turn.
    """
    size = runs[0][0].setup.run.answers.batch_size
    parts = [
        asked.questions[begin : begin + size] for begin in range(0, len(asked.questions), size)
    ]
    for plans in runs:
        entrants = [
            (plan, *_ready(plan, target, memories[plan.setup.model_id]))
            for plan in plans
            if not plan.is_answered
        ]
        # A run whose answers are all there has no entrant left.
        for index, (plan, answerer, rows) in in_turn(entrants, len(parts) * bool(entrants)):
            for row in islice(rows, len(plan.log.remaining(parts[index]))):
                yield plan.log, Finished(row, answerer.memory())


def _ready(plan: Plan, target: TargetModel, memory: Memory) -> tuple[Answerer, Iterator[AnswerRow]]:
    """Return an entrant after warm-up, with the memory of its earlier answers, and its rows to come.

    Its file is begun.
    """
    setup = plan.setup
    answerer: Answerer
    if isinstance(setup.method, Referee):
        limit, ends = setup.run.sampling.max_new_tokens, eos_ids(setup, target)
        settings = generate_settings(setup.run.sampling, stop_of(setup))
        answerer = RefereeAnswerer(target, setup.config, limit, ends, settings)
        if (size := setup.run.answers.batch_size) > 1:
            answerer.batch = BATCHES[setup.method.name](target, limit, ends, size, settings)
    else:
        answerer = method_answerer(setup, target)
        print_notes(answerer.notes())
    remaining = plan.log.remaining(plan.questions)
    warm_up(answerer, setup.conversation, remaining[0], setup.run.answers.warmup)
    if memory and isinstance(answerer, MethodAnswerer):
        answerer.drafter.load_memory(memory)
    plan.log.begin()
    return answerer, rows_of(answerer, setup.asking, remaining)
